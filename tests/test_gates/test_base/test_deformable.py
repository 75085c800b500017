"""Gated deformable attention takes and computes what mmcv's does; so does the one that gates nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import assert_same, values_and_gradients
from helpers.deformable import SIZES, make_call, pair
from mmcv.ops import MultiScaleDeformableAttention
from mmengine.registry import MODELS as ROOT
from torch import Tensor, nn

from mmgate import layers, swap_attention
from mmgate.errors import ConfigError
from mmgate.gates import PLuGMultiScaleDeformableAttention
from mmgate.gates.base.deformable import DeformableGate, UnevenDeformableAttention
from mmgate.registry import MODELS


def test_defaults_of_value_and_identity() -> None:
    vanilla, gated = pair()
    call = {k: v for k, v in make_call().items() if k not in ('identity', 'value', 'query_pos', 'key_padding_mask')}
    call['query'] = torch.randn(2, 30, 16)
    call['reference_points'] = torch.rand(2, 30, 2, 2)
    expected = vanilla(**call)
    torch.testing.assert_close(gated(**call), expected, rtol=0, atol=1e-6 * expected.abs().max().item())


def test_the_arguments_of_mmcv_are_taken() -> None:
    """The constructor's, and the deprecated name of ``identity``."""
    host = dict(im2col_step=32, norm_cfg=None, init_cfg=None, value_proj_ratio=0.5)
    vanilla, gated = pair(host=host)
    call = make_call()
    call['residual'] = call.pop('identity')
    with pytest.warns(DeprecationWarning, match='residual'):
        output = gated(**call)
    expected = vanilla(**call)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-6 * expected.abs().max().item())


@pytest.mark.parametrize('missing', ['reference_points', 'spatial_shapes', 'level_start_index'])
def test_missing_arguments_are_named(missing: str) -> None:
    with pytest.raises(ValueError, match='reference_points, spatial_shapes and level_start_index are needed'):
        PLuGMultiScaleDeformableAttention(**SIZES)(**make_call() | {missing: None})


@pytest.mark.parametrize(
    'kind, batch_first, columns, ratio',
    [
        (layers.MultiScaleDeformableAttention, True, 2, 1.0),
        (layers.MultiScaleDeformableAttention, False, 4, 0.5),
        (PLuGMultiScaleDeformableAttention, True, 4, 0.5),
        (PLuGMultiScaleDeformableAttention, False, 2, 1.0),
    ],
)
def test_outputs_and_gradients_are_mmcvs(batch_first: bool, columns: int, ratio: float, kind: type) -> None:
    attentions = pair(kind, host=dict(batch_first=batch_first, value_proj_ratio=ratio))
    call = make_call(columns, batch_first)
    names = ('query', 'query_pos', 'value', 'identity', 'reference_points')
    tensors = [call.pop(name) for name in names]

    def run(attention: nn.Module) -> dict[str, Tensor]:
        def attend(*x: Tensor) -> Tensor:
            return attention(**dict(zip(names, x, strict=True)), **call)

        return values_and_gradients(attend, tensors, range(len(names)))

    expected, actual = (run(attention) for attention in attentions)
    assert_same(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('kind', [layers.MultiScaleDeformableAttention, PLuGMultiScaleDeformableAttention])
def test_a_list_of_numbers_of_points_starts_as_one_number_does(kind: type) -> None:
    """Directions and distances are those of mmcv's start, level by level, and so is a second start."""
    sizes = dict(SIZES, num_levels=3)
    counts = (3, 6, 2)
    vanilla = MultiScaleDeformableAttention(**sizes | dict(num_points=6))
    attention: Any = kind(**sizes | dict(num_points=list(counts)))
    assert attention.num_points == counts and attention.num_levels == 3 and attention.gate.num_points == counts
    assert attention.attention_weights.out_features == 4 * 11
    expected = vanilla.sampling_offsets.bias.view(4, 3, 6, 2)
    expected = torch.cat([expected[:, level, :count] for level, count in enumerate(counts)], 1)
    for again in (False, True):
        if again:
            nn.init.normal_(attention.sampling_offsets.bias)
            attention.init_weights()
        torch.testing.assert_close(attention.sampling_offsets.bias.view(4, 11, 2), expected)
        assert not attention.sampling_offsets.weight.any() and not attention.attention_weights.weight.any()
        assert attention.num_points == counts and attention.num_levels == 3


def test_equal_numbers_in_a_list_are_one_number() -> None:
    attention = layers.MultiScaleDeformableAttention(**SIZES | dict(num_points=[3, 3]))
    assert attention.num_points == 3
    vanilla = MultiScaleDeformableAttention(**SIZES)
    attention.load_state_dict(vanilla.state_dict())
    direct = UnevenDeformableAttention(**SIZES | dict(num_points=[3, 3]))
    assert direct.num_points == 3
    torch.testing.assert_close(direct.sampling_offsets.bias, vanilla.sampling_offsets.bias)


def test_numbers_of_points_that_do_not_fit_are_named() -> None:
    """As an error of the input, which command lines print without a traceback; more of them are in test_uneven.py."""
    with pytest.raises(ConfigError, match=r'num_points=\[3\] has 1 numbers for 2 levels'):
        layers.MultiScaleDeformableAttention(**SIZES | dict(num_points=[3]))


def test_the_name_means_ours_in_a_rule_and_mmcvs_elsewhere() -> None:
    assert MODELS.get('MultiScaleDeformableAttention') is layers.MultiScaleDeformableAttention
    assert ROOT.get('mmgate.MultiScaleDeformableAttention') is layers.MultiScaleDeformableAttention
    assert ROOT.get('MultiScaleDeformableAttention') is MultiScaleDeformableAttention
    vanilla = MultiScaleDeformableAttention(**SIZES)
    names = list(vanilla.state_dict())
    model = nn.ModuleDict(dict(attn=vanilla))
    swap_attention(model, dict(path='attn', type='mmgate.MultiScaleDeformableAttention', backend='torch'))
    ours: Any = model['attn']
    assert ours is vanilla and type(ours.gate) is DeformableGate and ours.gate.backend == 'torch'
    assert list(ours.state_dict()) == names
    with pytest.raises(ValueError, match='backend'):
        layers.MultiScaleDeformableAttention(32, 4, 2, 3, backend='gpu')
    with pytest.raises(TypeError, match='embed_dim'):
        layers.MultiScaleDeformableAttention(embed_dim=32)
