"""The size of the map in pre-training, read off the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import needs_mmpretrain
from mmengine.registry import MODELS
from test_adapters import SVT, SWIN
from torch import nn

from mmgate import swap_attention

PVT = dict(type='mmdet.PyramidVisionTransformer', num_layers=[1, 1, 1, 1])
VIT = dict(type='mmpretrain.VisionTransformer', arch='deit-tiny')
PYRAMID = [(56, 56), (28, 28), (14, 14), (7, 7)]


@pytest.mark.parametrize('gate', ['AgentAttention', 'FocusedLinearAttention'])
@pytest.mark.parametrize(
    'host, path, sizes, class_tokens',
    [
        (PVT, 'layers.*.1.*.attn', PYRAMID, 0),
        (dict(SVT, depths=[1, 1, 1, 2]), 'layers.*.*.attn', [*PYRAMID, (7, 7)], 0),
        (dict(SWIN, type='mmdet.SwinTransformer', depths=(1, 1, 1, 1)), '**', PYRAMID, 0),
        pytest.param(dict(VIT, img_size=256), 'layers.1.attn', [(16, 16)], 1, marks=needs_mmpretrain),
        pytest.param(dict(VIT, img_size=(64, 96)), 'layers.1.attn', [(4, 6)], 1, marks=needs_mmpretrain),
    ],
    ids=['pvt', 'twins', 'swin', 'vit', 'oblong vit'],
)
def test_a_rule_need_not_name_it(
    host: dict[str, Any], path: str, sizes: list[tuple[int, int]], class_tokens: int, gate: str
) -> None:
    """Of each stage, by a single rule; no random number is taken for it."""
    model = MODELS.build(dict(host))
    before = torch.get_rng_state()
    names = swap_attention(model, dict(type=gate, path=path))
    assert torch.equal(before, torch.get_rng_state())
    gates: list[Any] = [model.get_submodule(name) for name in names]
    assert [gate.map_size for gate in gates] == sizes
    assert {gate.class_tokens for gate in gates} == {class_tokens}


@pytest.mark.parametrize('options, size', [({}, (14, 14)), (dict(map_size=(4, 6)), (4, 6))], ids=['read', 'said'])
def test_in_a_model_it_is_that_of_the_backbone_or_what_the_rule_says(options: dict, size: tuple[int, int]) -> None:
    model: Any = nn.ModuleDict(dict(neck=nn.Identity(), backbone=MODELS.build(PVT)))
    swap_attention(model, dict(type='SAGAAttention', path='backbone.layers.2.**', **options))
    assert model['backbone'].layers[2][1][1].attn.map_size == size


@needs_mmpretrain
def test_where_the_host_does_not_tell_the_message_says_what_to_write() -> None:
    """A distillation token beside the class token; an attention outside of any backbone."""
    distilled = MODELS.build(dict(VIT, type='mmpretrain.DistilledVisionTransformer'))
    with pytest.raises(ValueError, match=r'2 tokens of layers.0.attn lie on no map.*such as map_size=\(14, 14\)'):
        swap_attention(distilled, dict(type='SAGAAttention', path='layers.*.attn'))
    alone = MODELS.build(PVT).layers[0]
    with pytest.raises(ValueError, match=r'AgentAttention needs map_size=\(height, width\).*Write it into the rule'):
        swap_attention(alone, dict(type='AgentAttention', path='1.*.attn'))
