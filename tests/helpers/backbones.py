"""Small backbones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from conftest import tool
from mmengine.registry import MODELS, init_default_scope
from torch import Tensor, nn

from helpers.published import random_swin
from mmgate.mm import cli

SWIN = dict(embed_dims=16, depths=(2, 2, 2, 2), num_heads=(1, 2, 4, 8), window_size=4, drop_path_rate=0.0)
SVT = dict(type='mmseg.SVT', depths=[2, 2, 2, 2], windiow_sizes=[7, 7, 7, 7], drop_path_rate=0.0)
SVT.update(patch_sizes=[4, 2, 2, 2], strides=[4, 2, 2, 2], mlp_ratios=[1, 1, 1, 1], sr_ratios=[8, 4, 2, 1])
SVT.update(embed_dims=[16, 32, 64, 128], num_heads=[1, 2, 4, 8])
PRETRAIN = dict(arch=dict(embed_dims=16, depths=[2, 2, 2, 2], num_heads=[1, 2, 4, 8]), out_indices=(0, 1, 2, 3))
PRETRAIN.update(drop_path_rate=0.0, pad_small_map=True, window_size=4)


def vit(rule: dict[str, Any] | None, size: int = 224) -> nn.Module:
    """DeiT-T of two layers for images of a size, with attention over its map or the vanilla one."""
    init_default_scope('mmpretrain')
    arch = dict(embed_dims=192, num_layers=2, num_heads=3, feedforward_channels=768)
    model: dict[str, Any] = dict(
        type='ImageClassifier',
        backbone=dict(type='VisionTransformer', arch=arch, img_size=size, patch_size=16),
        head=dict(type='VisionTransformerClsHead', num_classes=1000, in_channels=192),
    )
    if rule is not None:
        attention = {'path': 'backbone.layers.*.attn', **rule}
        model.update(type='mmgate.Gated', host='mmpretrain.ImageClassifier', attention=attention)
    return MODELS.build(model)


def trained(model: nn.Module) -> nn.Module:
    """Give every matrix some size, so that what a swap loses shows."""
    if hasattr(model, 'init_weights'):
        model.init_weights()
    for name, parameter in model.named_parameters():
        if name.endswith('blocks.0.attn.w_msa.logit_scale'):  # of Swin v2, beyond its bound
            nn.init.constant_(parameter, 9.0)
        elif parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.1)
    model.eval()  # mmdet's Swin and mmseg's BEiT return nothing
    return model


def swin_state(classifier: bool = False) -> dict[str, Tensor]:
    return random_swin([2, 2, 6, 2], (2, 2, 6, 0), (9, 16, 49, 49), classifier)


def convert_file(src: Path, dst: Path, *options: str) -> int:
    return cli.main(tool('agent_attention', 'model_converters').main, [str(src), str(dst), *options])
