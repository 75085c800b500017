"""Gated deformable attention takes and computes what mmcv's does; so does the one that gates nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import assert_same, filled, values_and_gradients
from helpers.equations import SIZES, make_call
from mmcv.ops import MultiScaleDeformableAttention
from mmengine.registry import MODELS as ROOT
from torch import Tensor, nn

from mmgate import layers, swap_attention
from mmgate.errors import ConfigError
from mmgate.gates import PLuGMultiScaleDeformableAttention
from mmgate.gates.base.deformable import DeformableGate
from mmgate.registry import MODELS

OURS = layers.MultiScaleDeformableAttention
NAMES = ('query', 'query_pos', 'value', 'identity', 'reference_points')


@pytest.mark.parametrize(
    'kind, batch_first, columns, ratio, names',
    [
        (OURS, True, 2, 1.0, NAMES),
        (OURS, False, 4, 0.5, NAMES),
        (PLuGMultiScaleDeformableAttention, True, 4, 0.5, NAMES),
        (PLuGMultiScaleDeformableAttention, False, 2, 1.0, NAMES),
        (PLuGMultiScaleDeformableAttention, True, 2, 1.0, ('query', 'reference_points')),
    ],
)
def test_outputs_and_gradients_are_mmcvs(
    batch_first: bool, columns: int, ratio: float, kind: Any, names: tuple[str, ...]
) -> None:
    """With its weights, loaded from its state dict, its arguments, and its defaults of what a call leaves out."""
    options: dict[str, Any] = dict(batch_first=batch_first, dropout=0.0, value_proj_ratio=ratio, norm_cfg=None)
    vanilla, ours = (one(**SIZES, **options, im2col_step=32) for one in (MultiScaleDeformableAttention, kind))
    keys = ours.load_state_dict(filled(vanilla, 0.3).state_dict(), strict=False)
    assert not keys.unexpected_keys and all(key.startswith('gate.') for key in keys.missing_keys)
    call = make_call(columns, batch_first)
    if 'value' not in names:
        call['query'], call['reference_points'] = torch.randn(2, 30, 16), torch.rand(2, 30, 2, 2)
    tensors = [call[name] for name in names]
    call = {name: x for name, x in call.items() if name not in NAMES}

    def run(attention: nn.Module) -> dict[str, Tensor]:
        def attend(*x: Tensor) -> Tensor:
            return attention(**dict(zip(names, x, strict=True)), **call)

        return values_and_gradients(attend, tensors, range(len(names)))

    assert_same(run(ours), run(vanilla), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('kind', [OURS, PLuGMultiScaleDeformableAttention])
@pytest.mark.parametrize('counts', [(3, 6, 2), (6, 6, 6)], ids=str)
def test_a_list_of_numbers_of_points_starts_as_one_number_does(kind: Any, counts: tuple[int, ...]) -> None:
    """Directions and distances are those of mmcv's start, level by level, and so is a second start."""
    sizes = dict(SIZES, num_levels=3)
    vanilla, attention = (
        one(**sizes | dict(num_points=points))
        for one, points in ((MultiScaleDeformableAttention, 6), (kind, list(counts)))
    )
    assert attention.attention_weights.out_features == 4 * sum(counts)
    expected = vanilla.sampling_offsets.bias.view(4, 3, 6, 2)
    expected = torch.cat([expected[:, level, :count] for level, count in enumerate(counts)], 1)
    for _ in range(2):
        torch.testing.assert_close(attention.sampling_offsets.bias.view(4, -1, 2), expected)
        assert not attention.sampling_offsets.weight.any() and not attention.attention_weights.weight.any()
        assert attention.num_points == (6 if counts == (6, 6, 6) else counts) and attention.num_levels == 3
        nn.init.normal_(attention.sampling_offsets.bias)
        attention.init_weights()


def test_the_name_means_ours_in_a_rule_and_mmcvs_elsewhere() -> None:
    assert MODELS.get('MultiScaleDeformableAttention') is OURS
    assert ROOT.get('MultiScaleDeformableAttention') is MultiScaleDeformableAttention
    model: Any = nn.ModuleDict(dict(attn=MultiScaleDeformableAttention(**SIZES)))
    swap_attention(model, dict(path='attn', type='mmgate.MultiScaleDeformableAttention', backend='torch'))
    assert type(model['attn'].gate) is DeformableGate and model['attn'].gate.backend == 'torch'


@pytest.mark.parametrize(
    'options, error, said',
    [
        (dict(num_points=[3]), ConfigError, r'num_points=\[3\] has 1 numbers for 2 levels'),
        (dict(backend='gpu'), ConfigError, 'backend'),
        (dict(embed_dim=32), TypeError, 'embed_dim'),
    ],
)
def test_arguments_that_do_not_fit_are_named(options: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        OURS(**SIZES | options)
    for missing in ('reference_points', 'spatial_shapes', 'level_start_index'):
        with pytest.raises(ValueError, match='reference_points, spatial_shapes and level_start_index are needed'):
            OURS(**SIZES)(**make_call() | {missing: None})
