"""Hosts that are vision transformers are told from those that are parts of detectors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from mmcv.cnn.bricks.transformer import MultiheadAttention
from mmdet.models.backbones.swin import WindowMSA
from mmdet.models.layers.transformer.detr_layers import DetrTransformerEncoderLayer
from mmseg.models.backbones.vit import VisionTransformer
from torch import nn

from mmgate import swap_attention
from mmgate.hosts.vits import is_in_vit

C, HEADS = 16, 2


class ViTAttention(nn.Module):
    """As transformers has it."""


ViTAttention.__module__ = 'transformers.models.vit.modeling_vit'


class EncoderBlock(nn.Module):
    """As torchvision has it, around torch's attention."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attention = nn.MultiheadAttention(C, HEADS)


EncoderBlock.__module__ = 'torchvision.models.vision_transformer'


def mmseg_vit() -> nn.Module:
    return VisionTransformer(32, 16, embed_dims=C, num_layers=1, num_heads=HEADS)


HOSTS: dict[str, tuple[Callable[[], nn.Module], str, bool]] = {
    'torch': (lambda: nn.MultiheadAttention(C, HEADS), '', False),
    'mmcv': (lambda: MultiheadAttention(C, HEADS), '', False),
    'detr': (lambda: DetrTransformerEncoderLayer(dict(embed_dims=C, num_heads=HEADS)), 'self_attn', False),
    'swin': (lambda: WindowMSA(C, HEADS, (4, 4)), '', True),
    'mmseg_vit': (mmseg_vit, 'layers.0.attn', True),
    'torchvision': (EncoderBlock, 'self_attention', True),
    'transformers': (ViTAttention, '', True),
}


@pytest.mark.parametrize('name', HOSTS)
def test_a_vision_transformer_is_told_from_a_part_of_a_detector(name: str) -> None:
    make, path, expected = HOSTS[name]
    path = f'backbone.{path}'.rstrip('.')  # what a model calls it says nothing: DETR's encoder could be called so
    assert is_in_vit(nn.ModuleDict(dict(backbone=make())), path) == expected


@pytest.mark.parametrize('name', ['detr', 'mmseg_vit', 'swin', 'torchvision'])
def test_the_papers_start_follows(name: str) -> None:
    make, path, narrow = HOSTS[name]
    model = nn.ModuleDict(dict(host=make()))
    swap_attention(model, dict(path=f'host.{path}'.rstrip('.'), type='PLuGMultiheadAttention', init='paper'))
    gate = next(module for module in model.modules() if hasattr(module, 'gate_q_proj'))
    assert (gate.gml.weight.abs().max() < 0.1) == narrow == (not gate.gate_q_proj.bias.any())
