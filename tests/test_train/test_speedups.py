"""--speedups: any config gets what makes the step of mmgate's own configs faster, and nothing else."""

from __future__ import annotations

from copy import deepcopy

import pytest
from conftest import ROOT
from mmdet.models.dense_heads import DINOHead
from mmengine.config import Config

import mmgate  # noqa: F401  (mmseg:: resolves from here on)
from mmgate.train.config_file import differences, read_config
from mmgate.train.speedups import speed_up

MERGED = 'mmgate.GroupedOptimWrapperConstructor'
MATCHED_ONCE = dict(type='mmgate.MatchOnceHook')
CHANNELS_LAST = [dict(type='mmgate.ChannelsLastHook')]


def test_a_config_of_mmdet_becomes_as_fast_as_ours() -> None:
    vanilla = read_config(str(ROOT / 'configs/vanilla/deformable_detr/deformable-detr-refine_r50_8xb4-50e_coco.py'))
    cfg = read_config('mmdet::deformable_detr/deformable-detr-refine_r50_16xb2-50e_coco.py')
    line = speed_up(cfg)
    recipe = {'optim_wrapper.optimizer.weight_decay', 'train_dataloader.batch_size'}
    theirs, ours = (dict(c.to_dict(), auto_scale_lr={}) for c in (cfg, vanilla))
    changed = {one.partition(':')[0] for one in differences(theirs, ours, '')}
    assert {key for key in changed if not key.endswith('_scope_')} == recipe
    assert 'mmgate.MatchOnceHook' in line and MERGED in line
    assert speed_up(cfg) == '--speedups: the config has all of them'


def test_a_head_named_by_its_class() -> None:
    """As configs in mmengine's newer style name it."""
    cfg = read_config('mmdet::dino/dino-4scale_r50_8xb2-12e_coco.py')
    cfg.model.bbox_head.type = DINOHead
    speed_up(cfg)
    assert cfg.custom_hooks == [MATCHED_ONCE, *CHANNELS_LAST]


@pytest.mark.parametrize(
    ('name', 'hooks', 'assigner'),
    [
        ('mmseg::mask2former/mask2former_r50_8xb2-160k_ade20k-512x512.py', [MATCHED_ONCE], None),
        ('mmdet::maskformer/maskformer_r50_ms-16xb1-75e_coco.py', [], 'mmgate.HungarianAssigner'),
        ('mmdet::mask_rcnn/mask-rcnn_r50_fpn_1x_coco.py', [], None),
    ],
    ids=['masks', 'another head with Hungarian', 'no Hungarian'],
)
def test_a_head_gets_the_matching_that_fits_it(name: str, hooks: list[dict[str, str]], assigner: str | None) -> None:
    cfg = read_config(name)
    before = deepcopy(cfg.model.to_dict())
    speed_up(cfg)
    assert cfg.optim_wrapper.constructor == MERGED and cfg.custom_hooks == [*hooks, *CHANNELS_LAST]
    changed = list(differences(before, cfg.model.to_dict(), 'model'))
    expected = [f"model.train_cfg.assigner.type: 'HungarianAssigner' -> {assigner!r}"]
    assert changed == (expected if assigner else [])


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
