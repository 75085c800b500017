"""Windows, tables and maps of backbones that need more than a pass of a block."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from conftest import needs_mmpretrain
from helpers.backbones import PRETRAIN, SVT, SWIN, trained
from helpers.gated import learning
from mmengine.registry import MODELS

from mmgate import swap_attention

VIT = dict(img_size=(64, 64), embed_dims=32, num_layers=2, num_heads=4, out_indices=(0, 1), init_values=0.1)
V2_ARCH = dict(PRETRAIN['arch'], extra_norm_every_n_blocks=0)
SAM_ARCH = dict(embed_dims=32, num_layers=2, num_heads=4, feedforward_channels=64, global_attn_indexes=[1])
# name: backbone, side of its images, paths, attentions that match
BACKBONES: dict[str, tuple[dict[str, Any], tuple[int, int], str, int]] = {
    # windows of 7 on maps of 24 x 18: both sides padded; of 28 x 18: one, where the host masks nothing
    'twins_svt': (SVT, (96, 72), 'layers.*.*.attn', 8),
    'twins_svt_one_side': (SVT, (112, 72), 'layers.*.*.attn', 8),
    'beit_without_bias': (dict(type='mmseg.BEiT', qv_bias=False, **VIT), (64, 64), 'layers.*.attn', 2),
    'swin_of_mmpretrain': (dict(PRETRAIN, type='mmpretrain.SwinTransformer'), (96, 128), '**.w_msa', 8),
    # the last maps of one window, which it does not shift
    'swin_of_small_maps': (
        dict(PRETRAIN, type='mmpretrain.SwinTransformer', pad_small_map=False),
        (128, 192),
        '**.w_msa',
        8,
    ),
    'swin_v2': (dict(PRETRAIN, type='mmpretrain.SwinTransformerV2', arch=V2_ARCH), (96, 128), '**.w_msa', 8),
    # a window that does not divide the map, and an image of another size than the tables
    'sam': (
        dict(type='mmpretrain.ViTSAM', arch=SAM_ARCH, img_size=96, window_size=4, out_channels=8),
        (96, 128),
        'layers.*.attn',
        2,
    ),
    # shifted windows of both images included
    'swin_of_mmdet_without_bias': (dict(SWIN, type='mmdet.SwinTransformer', qkv_bias=False), (96, 64), '**.w_msa', 8),
}


@pytest.mark.parametrize(
    'name',
    [pytest.param(name, marks=[needs_mmpretrain] * ('mmpretrain' in BACKBONES[name][0]['type'])) for name in BACKBONES],
)
def test_a_backbone_with_windows_starts_as_the_vanilla_one(name: str) -> None:
    cfg, (height, width), path, count = BACKBONES[name]
    model = trained(MODELS.build(copy.deepcopy(cfg)))
    gated = copy.deepcopy(model)
    assert len(swap_attention(gated, dict(type='PLuGMultiheadAttention', path=path))) == count
    x = torch.randn(2, 3, height, width)
    with torch.no_grad():
        for expected, actual in zip(model(x), gated(x), strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    sum(map_.square().mean() for map_ in gated(x)).backward()
    assert learning(gated)
    copy.deepcopy(gated)  # as the EMA hook does
