"""The families of models that are exported, made small, with weights that find something, and images of shapes."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, TORCH
from mmengine.config import Config
from mmengine.dataset import Compose, pseudo_collate
from mmengine.model import revert_sync_batchnorm
from mmengine.registry import MODELS, init_default_scope
from shapes import write_shapes
from torch import nn

import mmgate  # noqa: F401

exports = pytest.mark.skipif(TORCH < (2, 9), reason='whole models are exported by torch 2.9 or newer')

RESNET = dict(depth=18, base_channels=8, init_cfg=None, frozen_stages=-1, norm_cfg=dict(type='BN', requires_grad=True))
PVT = dict(num_layers=(1, 1, 1, 1), init_cfg=None)
SWIN = dict(depths=(1, 1, 1, 2), init_cfg=None)
ONE_LAYER = dict(encoder=dict(num_layers=1), decoder=dict(num_layers=2))
TWO_LEVELS = dict(num_levels=2)
DETR = dict(backbone=RESNET, neck=dict(in_channels=[16, 32, 64]), **ONE_LAYER)
PIXELS = dict(pixel_decoder=dict(encoder=dict(num_layers=1)), transformer_decoder=dict(num_layers=2), num_queries=20)
MASKS = dict(backbone=RESNET, panoptic_head=dict(in_channels=[8, 16, 32, 64], **PIXELS))
UNSURE = dict(test_cfg=dict(object_mask_thr=0.02, iou_thr=0.1))  # untrained queries are on the panoptic map too
RPN = dict(test_cfg=dict(rpn=dict(nms_pre=100, max_per_img=50), rcnn=dict(max_per_img=20)))
SHAPES = 'plug/mask2former/plug-mask2former_r18_1xb8-1k_shapes-128x128.py'


def _gated_by(kind: str) -> dict[str, Any]:
    return dict(attention=dict(_delete_=True, type=kind, path='decode_head.transformer_decoder.layers.*.self_attn'))


# name: config below configs/, and what makes it small
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    'plug-deformable-detr': (
        'plug/deformable_detr/plug-deformable-detr-refine_r18_1xb8-12e_shapes.py',
        dict(
            num_feature_levels=2,
            backbone=dict(base_channels=8, out_indices=(2, 3)),
            neck=dict(in_channels=[32, 64], num_outs=2),
            encoder=dict(num_layers=1, layer_cfg=dict(self_attn_cfg=TWO_LEVELS)),
            decoder=dict(num_layers=1, layer_cfg=dict(cross_attn_cfg=TWO_LEVELS)),
        ),
    ),
    'plug-deformable-detr-twostage': (
        'plug/deformable_detr/plug-deformable-detr-refine-twostage_r50_8xb4-50e_coco.py',
        dict(num_queries=30, test_cfg=dict(max_per_img=20), **DETR),
    ),
    'plug-dino': (
        'plug/dino/plug-dino-4scale_r50_8xb2-12e_coco.py',
        dict(num_queries=30, test_cfg=dict(max_per_img=20), **DETR),
    ),
    'plug-mask2former': (SHAPES, dict(decode_head=dict(transformer_decoder=dict(num_layers=1)))),
    'sdpa-gate-mask2former': (SHAPES, _gated_by('SDPAGatedMultiheadAttention')),
    'dgsa-mask2former': (SHAPES, _gated_by('DifferentialGatedMultiheadAttention')),
    'plug-mask2former-instance': ('plug/mask2former/plug-mask2former_r50_8xb2-lsj-50e_coco.py', MASKS),
    'plug-mask2former-panoptic': (
        'plug/mask2former/plug-mask2former_r50_8xb2-lsj-50e_coco-panoptic.py',
        dict(**MASKS, **UNSURE),
    ),
    'agent-retinanet': ('agent/retinanet/agent-retinanet_pvt-t_1x_coco.py', dict(backbone=PVT)),
    'saga-retinanet': ('saga/retinanet/saga-retinanet_pvt-t_1x_coco.py', dict(backbone=PVT)),
    'agent-mask-rcnn': ('agent/mask_rcnn/agent-mask-rcnn_pvt-t_1x_coco.py', dict(backbone=PVT, **RPN)),
    'saga-mask-rcnn': (
        'saga/mask_rcnn/saga-mask-rcnn_swin-t_ms-crop-1x_coco.py',
        dict(backbone=dict(blocks=(1, 1, 1, 0), **SWIN), **RPN),
    ),
    'agent-semantic-fpn': (
        'agent/semantic_fpn/agent-semantic-fpn_pvt-t_8xb2-40k_ade20k-512x512.py',
        dict(backbone=PVT),
    ),
    'saga-upernet': (
        'saga/upernet/saga-upernet_swin-t_8xb2-160k_ade20k-512x512.py',
        dict(backbone=dict(blocks=(1, 1, 1, 0), **SWIN)),
    ),
}
SIZE = 128
# layers that start alike everywhere
LAST = ('retina_cls', 'rpn_cls', 'fc_cls', 'cls_branches', 'cls_embed', 'conv_seg')
LAST += ('attention_weights.weight', 'sampling_offsets.weight', 'mask_embed.4')
SURE = ('cls_embed', 'mask_embed')  # whose spread is wider, for some classes and places to stand out


def config(name: str) -> Config:
    """Return a family's config, small."""
    path, small = FAMILIES[name]
    cfg = Config.fromfile(ROOT / 'configs' / path)
    cfg.merge_from_dict(dict(model=small))
    return cfg


# by which maps of more than one class come out, and no pixel of a mask lies within rounding of the threshold
SEEDS = {'plug-mask2former': 1, 'plug-mask2former-instance': 1}


def build(name: str) -> nn.Module:
    """Return a family's model in eval mode, of random weights that make a difference between places and classes."""
    cfg = config(name)
    init_default_scope(cfg.default_scope)
    torch.manual_seed(SEEDS.get(name, 0))
    model = revert_sync_batchnorm(MODELS.build(cfg.model))
    model.init_weights()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if any(part in key for part in LAST):
                spread = 0.3 if any(part in key for part in SURE) else 0.05
                parameter.copy_(torch.randn_like(parameter) * (spread if parameter.dim() > 1 else 0.5))
            elif 'gml' in key or ('reg_branches' in key and parameter.dim() > 1):
                parameter.add_(torch.randn_like(parameter) * 0.05)
    for module in model.modules():  # as after training: no batch has been seen yet
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.running_var.fill_(0.5)
    model.eval()
    return model


def batches(name: str, folder: Path, sizes: Sequence[tuple[int, int]] = ((SIZE, SIZE),) * 2) -> list[dict[str, Any]]:
    """Return batches of one image of shapes each, scaled to width and height as a family's test pipeline does."""
    write_shapes(folder / 'shapes', num_train=1, num_val=4, size=SIZE)
    images = sorted((folder / 'shapes/val').glob('*.jpg'))
    scope = config(name).default_scope
    init_default_scope(scope)
    pack = 'PackDetInputs' if scope == 'mmdet' else 'PackSegInputs'
    keys = ('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor') if scope == 'mmdet' else None
    collated = []
    for number, (path, scale) in enumerate(zip(images, sizes, strict=False)):
        steps = [dict(type='LoadImageFromFile'), dict(type='Resize', scale=scale, keep_ratio=False)]
        packed = dict(type=pack, meta_keys=keys) if keys else dict(type=pack)
        collated.append(pseudo_collate([Compose([*steps, packed])(dict(img_path=str(path), img_id=number))]))
    return deepcopy(collated)
