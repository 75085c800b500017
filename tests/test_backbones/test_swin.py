"""PVT and Swin with any attention by its type, and the switches of agent attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import needs_mmpretrain
from helpers.families import MAP
from torch import nn

from mmgate.backbones.swin import UnshiftedWhole
from mmgate.layers import AgentAttention
from mmgate.layers.base.map import MapGate
from mmgate.layers.parts.stripes import merge_stripes, split_stripes
from mmgate.registry import MODELS

TYPES = sorted({kind.__name__ for kind, _ in MAP.values()} - {'CrossWindowAttention'})
TINY: dict[str, dict[str, Any]] = {
    'LinearPVT': dict(num_layers=(1, 1, 1, 1), drop_path_rate=0.0),
    'LinearPVTv2': dict(num_layers=(1, 1, 1, 1), drop_path_rate=0.0),
    'LinearSwin': dict(depths=(2, 2, 2, 2), drop_path_rate=0.0),
}


def build(kind: str, attention: Any, **overrides: Any) -> nn.Module:
    return MODELS.build(dict(type=f'mmgate.{kind}', attention=attention, **{**TINY[kind], **overrides}))


@torch.no_grad()
@pytest.mark.parametrize('attention', TYPES)
@pytest.mark.parametrize('kind', TINY)
def test_any_type_in_any_size(kind: str, attention: str) -> None:
    model = build(kind, dict(type=attention))
    model.init_weights()
    assert sum(type(m) is MODELS.get(attention).gate_type for m in model.modules()) == 4
    for size in ((32, 32), (33, 70)):
        maps = model.eval()(torch.randn(1, 3, *size))
        assert len(maps) == 4 and all(m.isfinite().all() for m in maps)
        assert maps[3].shape[2] == 1 or size != (32, 32)


def test_an_attention_for_each_stage() -> None:
    kinds = ['HydraAttention', 'EfficientAttention', 'AgentAttention', 'SAGAAttention']
    model = build('LinearPVT', [dict(type=kind) for kind in kinds])
    gates = [type(m) for m in model.modules() if isinstance(m, MapGate)]
    assert gates == [MODELS.get(kind).gate_type for kind in kinds]


@pytest.mark.parametrize('stripe', [(2, 2), (4, 1), (3, 5), (4, 6)], ids=str)
def test_stripes_come_back(stripe: tuple[int, int]) -> None:
    x = torch.randn(2, 24, 3)
    stripes = split_stripes(x, (4, 6), stripe)
    assert stripes.shape[1] == stripe[0] * stripe[1]
    assert torch.equal(merge_stripes(stripes, (4, 6), stripe), x)
    image = x.view(2, 4, 6, 3)
    assert torch.equal(stripes[0], torch.nn.functional.pad(image[0], (0, 0, 0, 9, 0, 9))[
        : stripe[0], : stripe[1]].flatten(0, 1))  # fmt: skip


def test_agent_windows_attend_each_by_itself() -> None:
    whole = AgentAttention(8, 2, map_size=(4, 4), agent_num=4).double()
    windowed = AgentAttention(8, 2, map_size=(8, 8), agent_num=4, window=4).double()
    windowed.load_state_dict(whole.state_dict())  # the biases have the window's shape
    x = torch.randn(2, 8, 8, 8, dtype=torch.float64)
    out = windowed(x.flatten(1, 2), (8, 8)).view_as(x)
    expected = whole(x[:, :4, 4:].flatten(1, 2), (4, 4)).view(2, 4, 4, 8)
    torch.testing.assert_close(out[:, :4, 4:], expected)
    torch.testing.assert_close(windowed(x[:, :3, :2].flatten(1, 2), (3, 2)), whole(x[:, :3, :2].flatten(1, 2), (3, 2)))
    assert windowed(x[:, :7, :5].flatten(1, 2), (7, 5)).isfinite().all()


@pytest.mark.parametrize('size, window', [((7, 14), 7), ((4, 16), 4), ((8, 8), 4)], ids=str)
def test_agent_windows_of_a_vit(size: tuple[int, int], window: int) -> None:
    """Its map is that of pre-training, which need not be square, and not that of a window."""
    attention = AgentAttention(8, 2, map_size=size, agent_num=4, window=window).double()
    x = torch.randn(2, size[0] * size[1], 8, dtype=torch.float64)
    assert torch.equal(attention(x), attention(x, size))
    assert attention.gate.ah_bias.shape[3] == attention.gate.aw_bias.shape[4] == window


@needs_mmpretrain
@pytest.mark.parametrize('size', [(7, 7), (7, 12), (12, 7), (14, 9)], ids=str)
def test_windows_of_small_maps_shift_as_mmpretrains(size: tuple[int, int]) -> None:
    """Not, where one is as long as the smaller side, as in the last stage at 224 x 384 pixels."""
    from mmpretrain.models.utils import ShiftWindowMSA as Host

    options = dict(embed_dims=8, num_heads=2, window_size=7, shift_size=3)
    ours, host = UnshiftedWhole(**options), Host(**options, pad_small_map=False)
    host.load_state_dict(ours.state_dict())
    x = torch.randn(2, size[0] * size[1], 8)
    torch.testing.assert_close(ours(x, size), host(x, size))


def test_windows_of_odd_blocks_shift() -> None:
    """Two blocks carry a token beyond its window, as in the authors' code; Swin's even blocks stay where they are."""
    sizes: dict[str, Any] = dict(depths=(2, 2, 2, 2), blocks=(2, 0, 0, 0), pretrain_img_size=64, pad_small_map=False)
    model: Any = MODELS.build(dict(type='mmgate.AgentSwin', attention=dict(window=8), **sizes))
    even, odd = (block.attn for block in model.stages[0].blocks)
    assert (even.gate.shifted, odd.gate.shifted) == (False, True) and even.gate.ah_bias.shape == (1, 3, 9, 8, 1)
    x = torch.randn(1, 256, 96, requires_grad=True)

    def reached(*layers: Any) -> torch.Tensor:
        out = x
        for layer in layers:
            out = out + layer(out, (16, 16))
        (gradient,) = torch.autograd.grad(out.view(16, 16, 96)[3, 3].sum(), x)
        return gradient.view(16, 16, 96).abs().sum(-1) > 0

    assert reached(even).nonzero().amax(0).tolist() == [7, 7]
    assert reached(odd).nonzero().unique().tolist() == [0, 1, 2, 3, 12, 13, 14, 15]  # of both sides, without a mask
    assert reached(even, odd).all()
    rolled = odd(x.view(1, 16, 16, 96).roll((4, 4), (1, 2)).flatten(1, 2), (16, 16)).view(16, 16, 96)
    odd.gate.shifted = False
    torch.testing.assert_close(odd(x, (16, 16)).view(16, 16, 96).roll((4, 4), (0, 1)), rolled)
    odd.gate.shifted = True
    assert odd(x[:, :35], (7, 5)).isfinite().all() and odd(x[:, :110], (10, 11)).isfinite().all()


@pytest.mark.parametrize(
    'options, gone, added',
    [
        (dict(bias=False), '_bias', set()),
        (dict(dwc=False), 'dwc.', set()),
        (dict(agents='static'), 'none', {'gate.agent_tokens'}),
    ],
    ids=str,
)
@pytest.mark.parametrize('agent_num', [4, 9])
def test_agent_switches(options: dict[str, Any], gone: str, added: set[str], agent_num: int) -> None:
    full = AgentAttention(8, 2, map_size=(4, 4)).state_dict()
    layer = AgentAttention(8, 2, map_size=(4, 4), agent_num=agent_num, pretrain_agent_num=4, **options).double()
    layer.gate.init_weights()
    assert set(layer.state_dict()) == {name for name in full if gone not in name} | added
    x = torch.randn(2, 20, 8, dtype=torch.float64)
    layer(x, (4, 5)).sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in layer.parameters())
    if added:
        assert layer.gate._agents(x, (4, 5)).equal(layer.gate._agents(x + 1, (4, 5)))
