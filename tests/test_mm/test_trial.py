"""The config of a trial: its length, the schedule in it, and what makes it stop, go on and know gates."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import needs_mmpretrain
from mmengine.config import Config

from mmgate.errors import ConfigError
from mmgate.mm.config_file import read_config
from mmgate.mm.trial import first_figure, make_trial

DETR = 'mmdet::deformable_detr/deformable-detr_r50_16xb2-50e_coco.py'
SEGFORMER = 'mmseg::segformer/segformer_mit-b0_8xb2-160k_ade20k-512x512.py'


def trial(config: str | Config, **options: Any) -> Config:
    cfg = read_config(config) if isinstance(config, str) else config
    make_trial(cfg, **{'steps_in_epoch': 100, **options})
    return cfg


def test_epochs_become_iterations() -> None:
    """50 epochs of 100 batches in 500 iterations: the drop at 40 epochs comes at 400."""
    cfg = trial(DETR, iters=500, validations=2)
    assert cfg.train_cfg == dict(type='IterBasedTrainLoop', max_iters=500, val_interval=250)
    (drop,) = [one for one in cfg.param_scheduler if one.type == 'MultiStepLR']
    assert (drop.milestones, drop.end, drop.by_epoch, drop.gamma) == ([400], 500, False, 0.1)
    checkpoints = dict(type='CheckpointHook', by_epoch=False, interval=250, max_keep_ckpts=2)
    assert cfg.default_hooks.checkpoint == checkpoints and not cfg.log_processor.by_epoch
    assert cfg.train_dataloader.sampler == dict(type='InfiniteSampler', shuffle=True)
    cfg.train_dataloader.sampler.type = 'MultiDataSampler'  # chooses the images of a batch, for instance
    assert trial(cfg, iters=250).train_dataloader.sampler.type == 'MultiDataSampler'


def test_epochs_stay_epochs() -> None:
    cfg = trial(DETR, epochs=5, validations=5)
    assert cfg.train_cfg == dict(type='EpochBasedTrainLoop', max_epochs=5, val_interval=1)
    assert cfg.param_scheduler[-1].milestones == [400] and cfg.train_dataloader.sampler.type == 'DefaultSampler'
    with pytest.raises(ConfigError, match='counts iterations: give --iters, such as --iters 500'):
        trial(SEGFORMER, epochs=5)


def test_iterations_are_squeezed_and_a_warm_up_stays_one() -> None:
    """160,000 iterations in 1,600: a warm-up of 1,500 would end after 15, and takes a twentieth, 80."""
    cfg = trial(SEGFORMER, iters=1600)
    warm_up, decay = cfg.param_scheduler
    assert (warm_up.begin, warm_up.end, decay.begin, decay.end) == (0, 80, 80, 1600)
    long = trial(SEGFORMER, iters=160_000)
    assert [(one.begin, one.end) for one in long.param_scheduler] == [(0, 8000), (8000, 160_000)]


def test_rates_of_a_decay_without_an_end() -> None:
    """An epoch's factor becomes an iteration's, so that the rate ends where it would."""
    schedulers = [dict(type='ExponentialLR', gamma=0.5, by_epoch=True)]
    loop = dict(by_epoch=True, max_epochs=4)
    cfg = Config(dict(train_cfg=loop, param_scheduler=schedulers, train_dataloader={}, optim_wrapper=dict(type='O')))
    cfg.train_dataloader = dict(batch_size=1)
    trial(cfg, iters=20, steps_in_epoch=10)
    assert cfg.param_scheduler[0].gamma ** 20 == pytest.approx(0.5**4) and cfg.param_scheduler[0].by_epoch is False


@pytest.mark.parametrize(
    ('rate', 'key'),
    [(20.0, 'mmgate.gates'), (dict(PLuGGate=20.0, SDPAGate=1.0), 'mmgate.gates.PLuGGate')],
    ids=['of all', 'of classes'],
)
def test_gates_get_their_rate_beside_the_keys_of_the_config(rate: Any, key: str) -> None:
    """Through any constructor, as with ``--gate``."""
    before = read_config(DETR).optim_wrapper.paramwise_cfg.custom_keys.to_dict()
    cfg = trial(DETR, iters=10, gate_rate=rate, checkpoint='vanilla.pth')
    assert cfg.optim_wrapper.constructor == 'mmgate.GateOptimWrapperConstructor'
    assert cfg.optim_wrapper.paramwise_cfg.custom_keys == {**before, key: dict(lr_mult=20.0)}
    assert cfg.load_from == 'vanilla.pth' and cfg.custom_imports['imports'] == ['mmgate']


@pytest.mark.parametrize(
    ('config', 'figure'),
    [
        (DETR, 'coco/bbox_mAP'),
        ('mmdet::mask2former/mask2former_r50_8xb2-lsj-50e_coco.py', 'coco/bbox_mAP'),
        (SEGFORMER, 'mIoU'),
        pytest.param('mmpretrain::deit/deit-tiny_4xb256_in1k.py', 'accuracy/top1', marks=needs_mmpretrain),
    ],
)
def test_the_first_figure_of_an_evaluation(config: str, figure: str) -> None:
    assert first_figure(read_config(config)) == figure


def test_a_metric_that_is_not_known_is_asked_for() -> None:
    metrics = [dict(type='DumpResults'), dict(type='CocoMetric', metric=['segm'], prefix='mine')]
    assert first_figure(Config(dict(test_evaluator=metrics))) == 'mine/segm_mAP'
    with pytest.raises(ConfigError, match='has LVISMetric, .*: give --metric NAME'):
        first_figure(Config(dict(test_evaluator=dict(type='LVISMetric'))))
    with pytest.raises(ConfigError, match='trains nothing'):
        trial(Config(dict(model=dict(type='M'))), iters=1)
