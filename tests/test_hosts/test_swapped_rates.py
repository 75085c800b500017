"""What a host says about dropout, drop path and the scale of its logits, after a swap."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import needs_mmpretrain
from mmcv.cnn.bricks.transformer import MultiheadAttention
from mmcv.ops import MultiScaleDeformableAttention
from mmdet.models.backbones.pvt import SpatialReductionAttention
from mmdet.models.backbones.swin import ShiftWindowMSA as DetShiftWindowMSA
from mmdet.models.backbones.swin import WindowMSA as DetWindowMSA
from mmdet.models.layers.transformer.utils import ConditionalAttention
from mmdet.models.utils.vlfuse_helper import BiMultiHeadAttention
from mmengine.registry import MODELS
from mmseg.models.backbones.beit import BEiTAttention
from mmseg.models.backbones.mit import EfficientMultiheadAttention
from mmseg.models.backbones.swin import ShiftWindowMSA as SegShiftWindowMSA
from mmseg.models.backbones.swin import WindowMSA as SegWindowMSA
from mmseg.models.backbones.twins import LocallyGroupedSelfAttention
from torch import Tensor, nn

from mmgate import swap_attention
from mmgate.layers import AgentAttention
from mmgate.ops.agent_attention import agent_attention_reference

C, H, B = 32, 4, 16
MAP = (4, 6)
Make = Callable[[float, float, float], nn.Module]
Run = Callable[[nn.Module, dict[str, Tensor]], Any]


def path(rate: float) -> dict[str, Any]:
    return dict(type='DropPath', drop_prob=rate)


def conditional(module: nn.Module, x: dict[str, Tensor]) -> Tensor:
    return module(x['x'], x['key'], x['pos'], key_pos=x['key_pos'], ref_sine_embed=x['pos'], is_first=True)


def windows(module: nn.Module, x: dict[str, Tensor]) -> Tensor:
    """Two windows an image, the second of which is shifted in from two sides."""
    return module(x['x'][:, :16], mask=x['mask'])


def vit(a: float, p: float, d: float, layer_scale: float = 0.5) -> nn.Module:
    from mmpretrain.models.utils.attention import MultiheadAttention as ViTAttention

    return ViTAttention(C, H, attn_drop=a, proj_drop=p, dropout_layer=path(d), layer_scale_init_value=layer_scale)


# name: the host by its three rates (of weights, output, path), how it is called, which rates it has
HOSTS: dict[str, tuple[Make, Run, str]] = {
    'mmcv': (
        lambda a, p, d: MultiheadAttention(C, H, a, p, path(d)),
        lambda m, x: m(x['x'], x['key'], x['key']),
        'apd',
    ),
    'torch': (lambda a, p, d: nn.MultiheadAttention(C, H, a), lambda m, x: m(x['x'], x['key'], x['key'])[0], 'a'),
    'pvt': (lambda a, p, d: SpatialReductionAttention(C, H, a, p, path(d)), lambda m, x: m(x['x'], MAP), 'apd'),
    'pvt_reduced': (
        lambda a, p, d: SpatialReductionAttention(C, H, a, p, path(d), sr_ratio=2),
        lambda m, x: m(x['x'], MAP),
        'apd',
    ),
    'mit': (lambda a, p, d: EfficientMultiheadAttention(C, H, a, p, path(d)), lambda m, x: m(x['x'], MAP), 'apd'),
    'swin_of_mmdet': (lambda a, p, d: DetWindowMSA(C, H, (4, 4), True, None, a, p), windows, 'ap'),
    'swin_of_mmseg': (lambda a, p, d: SegWindowMSA(C, H, (4, 4), True, None, a, p), windows, 'ap'),
    'twins': (
        lambda a, p, d: LocallyGroupedSelfAttention(C, H, True, None, a, p, window_size=2),
        lambda m, x: m(x['x'], MAP),
        'ap',
    ),
    'beit': (lambda a, p, d: BEiTAttention(C, H, (4, 6), 'qv_bias', None, a, p), lambda m, x: m(x['beit']), 'ap'),
    'conditional': (lambda a, p, d: ConditionalAttention(C, H, a, p, cross_attn=True), conditional, 'ap'),
    'fusion': (
        lambda a, p, d: BiMultiHeadAttention(C, C, C, H, a),
        lambda m, x: torch.cat(m(x['x'], x['key']), 1),
        'a',
    ),
    'deformable': (
        lambda a, p, d: MultiScaleDeformableAttention(C, H, 1, 2, dropout=p, batch_first=True),
        lambda m, x: m(
            x['x'],
            reference_points=x['points'],
            spatial_shapes=torch.tensor([MAP]),
            level_start_index=torch.tensor([0]),
        ),
        'p',
    ),
    'vit': (vit, lambda m, x: m(x['x']), 'apd'),
}


def cases(rates: dict[str, str]) -> list[Any]:
    """Names and rates; those of mmpretrain are skipped where it is missing."""
    return [
        pytest.param(name, rate, marks=[needs_mmpretrain] * (name == 'vit')) for name in rates for rate in rates[name]
    ]


def inputs() -> dict[str, Tensor]:
    x = {name: torch.randn(B, 24, C) for name in ('x', 'key', 'pos', 'key_pos')}
    mask = torch.zeros(2, 16, 16)
    mask[1, :8, 8:] = mask[1, 8:, :8] = -100.0
    return dict(x, beit=torch.randn(B, 25, C), points=torch.rand(B, 24, 1, 2), mask=mask)


def filled(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module


@pytest.mark.parametrize('name, rate', cases({name: rates for name, (_, _, rates) in HOSTS.items()}))
def test_a_dense_gate_drops_what_its_host_drops(name: str, rate: str) -> None:
    """With a gate that starts as the identity; all of the weights or of the output, or one path in two, by a seed."""
    make, run, _ = HOSTS[name]
    a, p, d = (float(rate == kind) for kind in 'apd')
    vanilla = nn.ModuleDict(dict(attn=filled(make(a, p, d / 2))))
    kind = 'PLuGMultiScaleDeformableAttention' if name == 'deformable' else 'PLuGMultiheadAttention'
    gated = copy.deepcopy(vanilla)
    swap_attention(gated, dict(path='attn', type=kind))
    gated.load_state_dict(vanilla.state_dict(), strict=False)
    outputs, x = {}, inputs()
    for mode in (True, False):
        for key, model in (('vanilla', vanilla), ('gated', gated)):
            torch.manual_seed(7)
            outputs[key, mode] = run(model.train(mode)['attn'], x)
        torch.testing.assert_close(outputs['gated', mode], outputs['vanilla', mode], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(outputs['gated', True], outputs['gated', False], atol=1e-2)


MAP_HOSTS: dict[str, Callable[..., nn.Module]] = {
    'vit': lambda a, p, d, **_: vit(a, p, d, layer_scale=0.0),
    'pvt': lambda a, p, d, **_: SpatialReductionAttention(C, H, a, p, path(d)),
    'swin_of_mmdet': lambda a, p, d, **k: DetShiftWindowMSA(C, H, 4, 0, True, k.get('scale'), a, p, path(d)),
    'swin_of_mmseg': lambda a, p, d, **k: SegShiftWindowMSA(C, H, 4, 0, True, k.get('scale'), a, p, path(d)),
    'twins': lambda a, p, d, **k: LocallyGroupedSelfAttention(C, H, True, k.get('scale'), a, p, window_size=2),
}


def over_the_map(name: str, *rates: float, **options: Any) -> AgentAttention:
    model = nn.ModuleDict(dict(attn=filled(MAP_HOSTS[name](*rates, **options))))
    swap_attention(model, dict(path='attn', type='AgentAttention', map_size=MAP, agent_num=4, dwc=False))
    return model['attn']


@pytest.mark.parametrize('name, rate', cases({name: 'ap' if name == 'twins' else 'apd' for name in MAP_HOSTS}))
def test_attention_over_the_whole_map_drops_what_its_host_drops(name: str, rate: str) -> None:
    a, p, d = (float(rate == kind) for kind in 'apd')
    attention, x = over_the_map(name, a, p, d / 2).train(), torch.randn(B, 24, C)
    if rate == 'd':
        dropped = attention(x, MAP).flatten(1).abs().amax(1) < 1e-7
        assert 0 < dropped.sum() < B
    else:
        bias = attention.proj.bias if rate == 'a' else torch.zeros(C)
        torch.testing.assert_close(attention(x, MAP), bias.expand(B, 24, C))
    assert attention.eval()(x, MAP).std() > 0.01


@pytest.mark.parametrize('scale', [None, 0.9])
@pytest.mark.parametrize('name', ['swin_of_mmdet', 'swin_of_mmseg', 'twins'])
def test_attention_over_the_whole_map_scales_as_its_host(name: str, scale: float | None) -> None:
    attention, x = over_the_map(name, 0.0, 0.0, 0.0, scale=scale).eval(), torch.randn(B, 24, C)
    q, k, v = (attention.split_heads(part) for part in attention.qkv(x).chunk(3, -1))
    agents = attention.split_heads(attention._agents(attention.qkv(x).chunk(3, -1)[0], MAP))
    factor = (C // H) ** -0.5 if scale is None else scale
    heads = agent_attention_reference(q, k, v, agents, *attention.biases(MAP), factor)
    torch.testing.assert_close(attention(x, MAP), attention.proj(heads.transpose(1, 2).flatten(2)))


@pytest.mark.parametrize('name', ['swin_of_mmdet', 'swin_of_mmseg', 'twins', 'beit'])
def test_a_dense_gate_refuses_a_scale_that_it_would_lose(name: str) -> None:
    host: Any = HOSTS[name][0](0.0, 0.0, 0.0)
    host.scale = 0.9
    with pytest.raises(ValueError, match='qk_scale of its own'):
        swap_attention(nn.ModuleDict(dict(attn=host)), dict(path='attn', type='PLuGMultiheadAttention'))


DEPTHS = dict(pvt=dict(num_layers=(1, 2, 1, 1)), swin=dict(depths=(1, 2, 1, 1), blocks=(1, 1, 1, 0)))


@pytest.mark.parametrize('kind', ['AgentPVT', 'SAGAPVT', 'AgentSwin', 'SAGASwin'])
def test_backbones_hand_their_rates_on(kind: str) -> None:
    """Drop path rises from block to block, in attention and feed-forward network; so do the others, at one rate."""
    rates = dict(drop_path_rate=0.4, drop_rate=0.2, **(dict(attn_drop_rate=0.3) if 'Agent' in kind else {}))
    model = MODELS.build(dict(type=f'mmgate.{kind}', **DEPTHS['pvt' if 'PVT' in kind else 'swin'], **rates))
    blocks = [b for b in model.modules() if hasattr(b, 'attn') and hasattr(b, 'ffn')]
    paths = [(getattr(b.attn, 'dropout_layer', None) or b.attn.drop, b.ffn.dropout_layer) for b in blocks]
    expected = [0.0, 0.1, 0.2, 0.3, 0.4]
    for own, rate in zip(paths, expected, strict=True):
        assert [getattr(drop, 'drop_prob', 0.0) for drop in own] == pytest.approx([rate, rate])
    attentions = [b.attn for b in blocks if hasattr(b.attn, 'attn_drop')]
    assert len(attentions) == (5 if 'PVT' in kind else 3)
    assert all(a.proj_drop.p == 0.2 and a.attn_drop == rates.get('attn_drop_rate', 0.0) for a in attentions)
