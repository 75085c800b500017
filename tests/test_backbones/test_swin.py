"""Windows of Swin: where they shift, and where they stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import needs_mmpretrain

from mmgate.analysis.probes.recording import record
from mmgate.backbones.swin import UnshiftedWhole
from mmgate.registry import MODELS


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
    for one in (ours, host):  # as figures are told
        with record(one, ['geometry']) as recording:
            one(x, size)
        assert recording['']['geometry'].last.tolist() == [*size, 7, 0 if min(size) == 7 else 3]


def test_calls_for_maps_of_other_sizes_do_not_meet() -> None:
    """As those of two threads: one begins while the other is inside the windows; one that fails changes nothing."""
    attention = UnshiftedWhole(embed_dims=8, num_heads=2, window_size=7, shift_size=3)
    maps = {size: torch.randn(1, size * size, 8) for size in (7, 14)}
    expected = {size: attention(x, (size, size)) for size, x in maps.items()}
    for outer, inner in ((7, 14), (14, 7)):
        between: list[torch.Tensor | None] = []

        def call(module: Any, args: Any, inner: int = inner, between: list[Any] = between) -> None:
            if not between:
                between.append(None)
                between[0] = attention(maps[inner], (inner, inner))

        handle = attention.w_msa.register_forward_pre_hook(call)
        torch.testing.assert_close(attention(maps[outer], (outer, outer)), expected[outer])
        torch.testing.assert_close(between[0], expected[inner])
        handle.remove()
    with pytest.raises(RuntimeError):
        attention(maps[7][..., :4], (7, 7))
    torch.testing.assert_close(attention(maps[14], (14, 14)), expected[14])


@torch.no_grad()
def test_windows_of_small_maps_shift_as_mmdets_unless_they_are_told_not_to() -> None:
    """The map of the third stage, 7 x 10, is as high as a window."""
    sizes: dict[str, Any] = dict(embed_dims=32, depths=(2, 2, 2, 2), num_heads=(1, 2, 4, 8), drop_path_rate=0.0)
    ours = dict(type='mmgate.Swin')
    kinds = [dict(type='mmdet.SwinTransformer'), ours, dict(ours, pad_small_map=False)]
    models: list[Any] = [MODELS.build(dict(kind, **sizes)) for kind in kinds]
    x = torch.randn(1, 3, 112, 160)
    maps = []
    for model in models:
        model.load_state_dict(models[0].state_dict())
        model.eval()  # mmdet's returns nothing
        maps.append(model(x))
    expected, usual, unshifted = maps
    torch.testing.assert_close(usual, expected)
    found = [torch.allclose(*pair, atol=1e-5) for pair in zip(unshifted, expected, strict=True)]
    assert found == [True, True, False, False]


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
