"""The deformable attentions against mmcv's: the one that gates nothing, and PLuG at its identity start."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from conftest import values_and_gradients
from mmcv.ops import MultiScaleDeformableAttention as MMCVAttention
from mmengine.registry import MODELS as ROOT
from torch import Tensor, nn

from mmgate import swap_attention
from mmgate.layers import MultiScaleDeformableAttention, PLuGMultiScaleDeformableAttention
from mmgate.registry import MODELS

RULE = dict(path='attn', type='MultiScaleDeformableAttention')


def pair(kind: str = 'MultiScaleDeformableAttention', **kwargs: Any) -> tuple[nn.Module, nn.Module]:
    vanilla = MMCVAttention(32, 4, 2, 3, dropout=0.0, **kwargs)
    for parameter in vanilla.parameters():
        nn.init.normal_(parameter, std=0.3)
    model = nn.ModuleDict(dict(attn=copy.deepcopy(vanilla)))
    swap_attention(model, dict(RULE, type=kind))
    return vanilla, model['attn']


@pytest.mark.parametrize('kind', [MultiScaleDeformableAttention, PLuGMultiScaleDeformableAttention])
@pytest.mark.parametrize('batch_first', [True, False])
@pytest.mark.parametrize('columns', [2, 4])
@pytest.mark.parametrize('ratio', [1.0, 0.5])
def test_outputs_and_gradients_are_mmcvs(batch_first: bool, columns: int, ratio: float, kind: type) -> None:
    vanilla, ours = pair(kind.__name__, batch_first=batch_first, value_proj_ratio=ratio)
    assert type(ours) is kind
    shapes = torch.tensor([[4, 6], [2, 3]])
    query, query_pos, value = torch.randn(2, 5, 32), torch.randn(2, 5, 32), torch.randn(2, 30, 32)
    mask = torch.arange(30)[None] >= torch.tensor([[30], [25]])
    fixed = dict(key_padding_mask=mask, spatial_shapes=shapes, level_start_index=torch.tensor([0, 24]))
    points = torch.rand(2, 5, 2, columns)
    tensors = [x if batch_first else x.transpose(0, 1) for x in (query, query_pos, value)]

    def run(attention: nn.Module) -> dict[str, Tensor]:
        def call(query: Tensor, query_pos: Tensor, value: Tensor, points: Tensor) -> Tensor:
            return attention(query, value=value, query_pos=query_pos, reference_points=points, **fixed)

        return values_and_gradients(call, [*tensors, points], (0, 1, 2, 3))

    actual, expected = run(ours), run(vanilla)
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=1e-5, atol=1e-5)


def test_the_name_means_ours_in_a_rule_and_mmcvs_elsewhere() -> None:
    assert MODELS.get('MultiScaleDeformableAttention') is MultiScaleDeformableAttention
    assert ROOT.get('mmgate.MultiScaleDeformableAttention') is MultiScaleDeformableAttention
    assert ROOT.get('MultiScaleDeformableAttention') is MMCVAttention
    model = nn.ModuleDict(dict(attn=MMCVAttention(32, 4, 2, 3)))
    swap_attention(model, dict(RULE, type='mmgate.MultiScaleDeformableAttention', backend='torch'))
    assert model['attn'].backend == 'torch'


def test_it_adds_no_parameters() -> None:
    vanilla, ours = pair()
    assert list(vanilla.state_dict()) == list(ours.state_dict())


def test_plug_is_it_and_a_gate() -> None:
    assert issubclass(PLuGMultiScaleDeformableAttention, MultiScaleDeformableAttention)
    with pytest.raises(ValueError, match='backend'):
        MultiScaleDeformableAttention(32, 4, 2, 3, backend='gpu')
    with pytest.raises(TypeError, match='embed_dim'):
        MultiScaleDeformableAttention(embed_dim=32)
