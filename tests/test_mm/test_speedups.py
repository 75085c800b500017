"""--speedups: any config gets what makes the step of mmgate's own configs faster, and nothing else."""

from __future__ import annotations

from copy import deepcopy
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import ROOT
from helpers import zoo
from mmcv.ops import DeformConv2d, ModulatedDeformConv2d
from mmdet.models.dense_heads import DINOHead
from mmdet.models.necks import FPN_CARAFE
from mmengine.config import Config
from mmengine.registry import HOOKS
from torch import Tensor, nn
from torch.nn import functional

import mmgate  # noqa: F401  (mmseg:: resolves from here on)
from mmgate.mm.config_file import differences, mappings, read_config
from mmgate.mm.speedups import speed_up
from mmgate.speed.hooks import ChannelsLastHook

MERGED = 'mmgate.GroupedOptimWrapperConstructor'
MATCHED_ONCE = dict(type='mmgate.MatchOnceHook')
SAMPLED = dict(type='mmgate.SamplingHook')
CHANNELS_LAST = [dict(type='mmgate.ChannelsLastHook')]


def test_a_config_of_mmdet_becomes_as_fast_as_ours() -> None:
    vanilla = read_config(str(ROOT / 'configs/vanilla/deformable_detr/deformable-detr-refine_r50_8xb4-50e_coco.py'))
    cfg = read_config('mmdet::deformable_detr/deformable-detr-refine_r50_16xb2-50e_coco.py')
    line = speed_up(cfg)
    recipe = {'optim_wrapper.optimizer.weight_decay', 'train_dataloader.batch_size'}
    theirs, ours = (dict(c.to_dict(), auto_scale_lr={}) for c in (cfg, vanilla))
    changed = {one.partition(':')[0] for one in differences(theirs, ours, '')}
    assert {key for key in changed if not key.endswith('_scope_')} == recipe
    assert 'mmgate.MatchOnceHook' in line and 'mmgate.SamplingHook' in line and MERGED in line
    assert speed_up(cfg) == '--speedups: the config has all of them'


def test_a_head_named_by_its_class() -> None:
    """As configs in mmengine's newer style name it."""
    cfg = read_config('mmdet::dino/dino-4scale_r50_8xb2-12e_coco.py')
    cfg.model.bbox_head.type = DINOHead
    speed_up(cfg)
    assert cfg.custom_hooks == [MATCHED_ONCE, SAMPLED, *CHANNELS_LAST]


@pytest.mark.parametrize(
    ('name', 'hooks'),
    [
        ('mmseg::mask2former/mask2former_r50_8xb2-160k_ade20k-512x512.py', [MATCHED_ONCE, SAMPLED]),
        ('mmdet::mask_rcnn/mask-rcnn_r50_fpn_1x_coco.py', []),
    ],
    ids=['masks', 'no matching'],
)
def test_a_head_gets_the_matching_that_fits_it(name: str, hooks: list[dict[str, str]]) -> None:
    cfg = read_config(name)
    before = deepcopy(cfg.model.to_dict())
    speed_up(cfg)
    assert cfg.optim_wrapper.constructor == MERGED and cfg.custom_hooks == [*hooks, *CHANNELS_LAST]
    assert cfg.model.to_dict() == before


def test_deformable_attention_inside_of_a_gated_model_counts() -> None:
    """The pixel decoder's has no gate, and ConditionalDETR has no such attention."""
    cfg = read_config(str(ROOT / 'configs/vanilla/mask2former/ungated-mask2former_r50_8xb2-lsj-50e_coco.py'))
    speed_up(cfg)
    assert SAMPLED in cfg.custom_hooks
    cfg = read_config('mmdet::conditional_detr/conditional-detr_r50_8xb2-50e_coco.py')
    speed_up(cfg)
    assert cfg.custom_hooks == [MATCHED_ONCE, *CHANNELS_LAST]


def test_what_a_config_has_stays() -> None:
    """Its constructor with the settings, its hooks; a gated config's constructor merges by itself."""
    wrapper = dict(optimizer=dict(type='AdamW'), constructor='LayerDecay', paramwise_cfg=dict(num_layers=12))
    cfg = Config(dict(model=dict(type='M', backbone={}), optim_wrapper=wrapper, custom_hooks=[dict(type='EMAHook')]))
    speed_up(cfg)
    assert cfg.optim_wrapper.constructor == MERGED
    assert cfg.optim_wrapper.paramwise_cfg == dict(num_layers=12, grouped='LayerDecay')
    assert cfg.custom_hooks == [dict(type='EMAHook'), *CHANNELS_LAST]
    gated = 'mmgate.GateOptimWrapperConstructor'
    cfg = Config(dict(optim_wrapper=dict(optimizer=dict(type='AdamW'), constructor=gated)))
    speed_up(cfg)
    assert cfg.optim_wrapper.constructor == gated


def test_a_model_around_a_detector_has_no_backbone_for_channels_last() -> None:
    """The hook would look for it in vain, and end the run."""
    cfg = read_config('mmdet::soft_teacher/soft-teacher_faster-rcnn_r50-caffe_fpn_180k_semi-0.1-coco.py')
    before = deepcopy(cfg.custom_hooks)
    speed_up(cfg)
    assert cfg.custom_hooks == before and cfg.optim_wrapper.constructor == MERGED


STEPS = {
    'faster_rcnn': 'faster_rcnn/faster-rcnn_r50_fpn_1x_coco.py',
    'mask_rcnn': 'mask_rcnn/mask-rcnn_r50_fpn_1x_coco.py',
    'cascade_mask_rcnn': 'cascade_rcnn/cascade-mask-rcnn_r50_fpn_1x_coco.py',
    'dcn': 'dcn/faster-rcnn_r50-dconv-c3-c5_fpn_1x_coco.py',
    'dcnv2': 'dcnv2/faster-rcnn_r50-mdconv-c3-c5_fpn_1x_coco.py',
    'dyhead': 'dyhead/atss_r50_fpn_dyhead_1x_coco.py',
    'retinanet': 'retinanet/retinanet_r50_fpn_1x_coco.py',
    'detr': 'detr/detr_r18_8xb2-500e_coco.py',
    'deformable_detr': 'deformable_detr/deformable-detr_r50_16xb2-50e_coco.py',
}
WIDTHS = ('in_channels', 'out_channels', 'feat_channels', 'conv_out_channels', 'fc_out_channels')


def thin(cfg: Config) -> None:
    """Make a detector with a ResNet-50 thin: an eighth of the backbone's channels, 16 in neck and heads."""
    cfg.model.backbone.base_channels = cfg.model.backbone.stem_channels = 8
    for _, entry in mappings(cfg.model):
        for key in WIDTHS:
            if isinstance(entry.get(key), int):
                entry[key] = 16
        if 'num_groups' in entry:
            entry.num_groups = 4
    neck = cfg.model.neck[0] if isinstance(cfg.model.neck, list) else cfg.model.neck
    neck.in_channels = [32, 64, 128, 256]


def losses_and_gradients(model: nn.Module, data: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    torch.manual_seed(1)  # of the sampled regions
    model.zero_grad()
    total, losses = model.parse_losses(model(**deepcopy(data), mode='loss'))
    total.backward()
    losses = {name: loss.detach().reshape(()) for name, loss in losses.items()}
    return losses, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize('name', STEPS)
def test_losses_and_gradients_stay(name: str) -> None:
    """Also where mmcv's operators, which read memory as NCHW, follow the backbone or are inside of it."""
    cfg = zoo.reduced(f'mmdet::{STEPS[name]}')
    if not name.endswith('detr'):
        thin(cfg)
    torch.manual_seed(0)
    model = zoo.build(deepcopy(cfg)).train()
    for module in model.modules():
        if isinstance(module, (DeformConv2d, ModulatedDeformConv2d)) and hasattr(module, 'conv_offset'):
            nn.init.normal_(module.conv_offset.weight, std=0.1)
    data = zoo.batch(cfg, (96, 128))
    losses, gradients = losses_and_gradients(model, data)
    speed_up(cfg)
    said: list[str] = []
    run = SimpleNamespace(model=model, logger=SimpleNamespace(info=said.append))
    for entry in cfg.custom_hooks:
        hook = HOOKS.build(entry)
        hook.before_run(run)
        hook.before_train(run)
    actual, actual_gradients = losses_and_gradients(model, data)
    torch.testing.assert_close(actual, losses, rtol=1e-4, atol=1e-5)
    largest = max(gradient.norm() for gradient in gradients.values())
    # Rounding puts a few samples of deformable attention on the other side of a pixel's centre.
    tolerance = 5e-3 if name == 'deformable_detr' else 1e-4
    for parameter, gradient in gradients.items():
        apart = (actual_gradients[parameter] - gradient).norm()
        assert apart <= tolerance * gradient.norm() + 1e-6 * largest, parameter
    assert bool(said) == name.startswith(('dcn', 'deformable')), said


def test_carafe_gets_maps_as_it_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU mmcv has no kernel of CARAFE, so that another enlargement stands for it."""
    seen: list[bool] = []

    def enlarge(features: Tensor, masks: Tensor, *options: Any) -> Tensor:
        seen.extend((features.is_contiguous(), masks.is_contiguous()))
        return functional.interpolate(features, scale_factor=2)

    monkeypatch.setitem(vars(import_module('mmcv.ops.carafe')), 'carafe', enlarge)
    backbone = nn.ModuleList([nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 2, 1)])
    backbone.forward = lambda x: (backbone[0](x), backbone[1](backbone[0](x)))  # type: ignore[method-assign]
    neck = FPN_CARAFE([8, 8], 8, 2)
    run = SimpleNamespace(model=nn.ModuleDict(dict(backbone=backbone, neck=neck)))
    ChannelsLastHook().before_run(run)
    neck(backbone(torch.randn(2, 3, 32, 32)))
    assert seen and all(seen)
