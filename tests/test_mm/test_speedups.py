"""--speedups: any config gets what makes the step of mmgate's own configs faster, and nothing else."""

from __future__ import annotations

from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import ROOT
from helpers import zoo
from helpers.matching import draw_boxes_anew
from mmcv.ops import DeformConv2d, ModulatedDeformConv2d
from mmdet.models.dense_heads import DINOHead
from mmengine.config import Config
from mmengine.registry import HOOKS
from torch import Tensor, nn

import mmgate  # noqa: F401  (mmseg:: resolves from here on)
from mmgate.mm.config_file import differences, mappings, read_config
from mmgate.mm.speedups import speed_up

MERGED = 'mmgate.GroupedOptimWrapperConstructor'
MATCHED_ONCE, SAMPLED, LAST = 'MatchOnceHook', 'SamplingHook', 'ChannelsLastHook'


def test_a_config_of_mmdet_becomes_as_fast_as_ours() -> None:
    vanilla = read_config(str(ROOT / 'configs/vanilla/deformable_detr/deformable-detr-refine_r50_8xb4-50e_coco.py'))
    cfg = read_config('mmdet::deformable_detr/deformable-detr-refine_r50_16xb2-50e_coco.py')
    line = speed_up(cfg)
    recipe = {'optim_wrapper.optimizer.weight_decay', 'train_dataloader.batch_size'}
    theirs, ours = (dict(c.to_dict(), auto_scale_lr={}) for c in (cfg, vanilla))
    changed = {one.partition(':')[0] for one in differences(theirs, ours, '')}
    assert {key for key in changed if not key.endswith('_scope_')} == recipe
    assert all(name in line for name in (MATCHED_ONCE, SAMPLED, MERGED))
    assert speed_up(cfg) == '--speedups: the config has all of them'


@pytest.mark.parametrize(
    ('name', 'hooks'),
    [
        ('mmseg::mask2former/mask2former_r50_8xb2-160k_ade20k-512x512.py', [MATCHED_ONCE, SAMPLED, LAST]),
        ('mmdet::mask_rcnn/mask-rcnn_r50_fpn_1x_coco.py', [LAST]),
        # Its attention is not deformable.
        ('mmdet::conditional_detr/conditional-detr_r50_8xb2-50e_coco.py', [MATCHED_ONCE, LAST]),
        # Deformable attention inside of a gated model, which has no gate there.
        (str(ROOT / 'configs/vanilla/mask2former/ungated-mask2former_r50_8xb2-lsj-50e_coco.py'), [SAMPLED]),
        # A model around a detector has no backbone: the hook would look for it in vain, and end the run.
        ('mmdet::soft_teacher/soft-teacher_faster-rcnn_r50-caffe_fpn_180k_semi-0.1-coco.py', ['MeanTeacherHook']),
    ],
    ids=['masks', 'no matching', 'no sampling', 'gated', 'no backbone'],
)
def test_a_config_gets_the_hooks_that_fit_it(name: str, hooks: list[str]) -> None:
    cfg = read_config(name)
    before = deepcopy(cfg.model.to_dict())
    speed_up(cfg)
    found = [hook.type.rpartition('.')[2] for hook in cfg.custom_hooks]
    assert found == hooks or (hooks == [SAMPLED] and SAMPLED in found)
    assert cfg.optim_wrapper.constructor == MERGED or 'ungated' in name
    assert cfg.model.to_dict() == before


def test_a_head_named_by_its_class() -> None:
    """As configs in mmengine's newer style name it; hooks of the config stay."""
    cfg = read_config('mmdet::dino/dino-4scale_r50_8xb2-12e_coco.py')
    cfg.model.bbox_head.type = DINOHead
    cfg.custom_hooks = [dict(type='EMAHook')]
    speed_up(cfg)
    added = [f'mmgate.{name}' for name in (MATCHED_ONCE, SAMPLED, LAST)]
    assert [hook.type for hook in cfg.custom_hooks] == ['EMAHook', *added]


STEPS = {
    'mask_rcnn': 'mask_rcnn/mask-rcnn_r50_fpn_1x_coco.py',
    'dcn': 'dcn/faster-rcnn_r50-dconv-c3-c5_fpn_1x_coco.py',
    'dcnv2': 'dcnv2/faster-rcnn_r50-mdconv-c3-c5_fpn_1x_coco.py',
    'dyhead': 'dyhead/atss_r50_fpn_dyhead_1x_coco.py',
    'retinanet': 'retinanet/retinanet_r50_fpn_1x_coco.py',
    'detr': 'detr/detr_r18_8xb2-500e_coco.py',
    'deformable_detr': 'deformable_detr/deformable-detr-refine_r50_16xb2-50e_coco.py',
    'dino': 'dino/dino-4scale_r50_8xb2-12e_coco.py',
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
    """Also where mmcv's operators, which read memory as NCHW, follow the backbone or are inside of it.

    Images are of unequal size. DINO's labels have no noise, which we draw in other numbers.
    """
    cfg = zoo.reduced(f'mmdet::{STEPS[name]}')
    if 'detr' not in name and name != 'dino':
        thin(cfg)
    if name == 'dino':
        cfg.model.dn_cfg.label_noise_scale = 1e-9
    torch.manual_seed(0)
    model = zoo.build(deepcopy(cfg)).train()
    for module in model.modules():
        if isinstance(module, (DeformConv2d, ModulatedDeformConv2d)) and hasattr(module, 'conv_offset'):
            nn.init.normal_(module.conv_offset.weight, std=0.1)
    data = zoo.batch(cfg, (96, 128))
    if name == 'dino':
        draw_boxes_anew(model.dn_query_generator)
    data['inputs'][1, :, 70:] = data['inputs'][1, :, :, 100:] = 0
    data['data_samples'][1].set_metainfo(dict(img_shape=(70, 100)))
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
    tolerance = 5e-3 if name in ('deformable_detr', 'dino') else 1e-4
    for parameter, gradient in gradients.items():
        apart = (actual_gradients[parameter] - gradient).norm()
        assert apart <= tolerance * gradient.norm() + 1e-6 * largest, parameter
    assert bool(said) == name.startswith(('dcn', 'deformable', 'dino')), said
