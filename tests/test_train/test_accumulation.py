"""Images of an optimizer step, and what is scaled to go with them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from mmengine.config import Config
from mmengine.logging import MMLogger
from mmengine.optim import build_optim_wrapper
from mmengine.runner import Runner
from torch import nn

from mmgate.errors import ConfigError
from mmgate.train.accumulation import accumulation, enable_auto_accumulate, enable_auto_scale_lr


def make_config(batch: int = 4, **changes: Any) -> Config:
    cfg = dict(
        launcher='pytorch',
        train_dataloader=dict(batch_size=batch),
        train_cfg=dict(type='EpochBasedTrainLoop', max_epochs=50, val_interval=1),
        optim_wrapper=dict(type='OptimWrapper', optimizer=dict(type='AdamW', lr=2e-4)),
        param_scheduler=[
            dict(type='LinearLR', by_epoch=False, begin=0, end=500),
            dict(type='MultiStepLR', by_epoch=True, begin=0, end=50, milestones=[40]),
        ],
        auto_scale_lr=dict(base_batch_size=32),
    )
    return Config({**cfg, **changes})


@pytest.mark.parametrize(
    'launcher, variable, world, batch, counts',
    [
        *(('pytorch', 'WORLD_SIZE', world, batch, 32 // (world * batch)) for world in (1, 2, 8) for batch in (1, 4)),
        ('slurm', 'SLURM_NTASKS', 8, 4, 1),
        ('mpi', 'OMPI_COMM_WORLD_SIZE', 8, 4, 1),
        ('none', 'WORLD_SIZE', 8, 4, 8),  # one process
    ],
)
def test_a_step_has_32_images(
    monkeypatch: pytest.MonkeyPatch, launcher: str, variable: str, world: int, batch: int, counts: int
) -> None:
    monkeypatch.setenv(variable, str(world))
    cfg = make_config(batch, launcher=launcher)
    note = enable_auto_accumulate(cfg)
    assert accumulation(cfg) == counts and '= 32 a step' in note


@pytest.mark.parametrize(
    'world, changes, message',
    [
        (3, {}, '3 processes x 4 images = 12 at a time, and 32 a step is no multiple. Change'),
        (16, {}, '16 processes x 4 images = 64 at a time, and 32 a step is no multiple. Change'),
        (1, dict(auto_scale_lr=dict(enable=False)), 'needs auto_scale_lr.base_batch_size'),
        (1, dict(strategy=dict(type='DeepSpeedStrategy')), 'strategy.gradient_accumulation_steps=8'),
        (1, dict(optim_wrapper=dict(constructor='Two', a=1)), 'accumulative_counts=8'),
        (1, dict(train_dataloader=dict()), 'no train_dataloader.batch_size'),
    ],
    ids=['odd world', 'too many', 'no base', 'DeepSpeed', 'two optimizers', 'no batch'],
)
def test_says_why_no_accumulation_does(
    monkeypatch: pytest.MonkeyPatch, world: int, changes: dict[str, Any], message: str
) -> None:
    monkeypatch.setenv('WORLD_SIZE', str(world))
    with pytest.raises(ConfigError, match=message):
        enable_auto_accumulate(make_config(**changes))
    if 'auto_scale_lr' in changes:
        with pytest.raises(ConfigError, match=message):
            enable_auto_scale_lr(make_config(**changes))


def test_iterations_are_stretched_so_that_the_steps_stay_as_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv('WORLD_SIZE', '2')
    loop = dict(max_iters=1000, val_interval=100, dynamic_intervals=[(900, 1000)], val_begin=1)
    schedulers = [
        dict(type='PolyLR', by_epoch=False, begin=0, end=1000, power=0.9),
        dict(type='MultiStepLR', by_epoch=False, milestones=[600, 900]),
        dict(type='ExponentialLR', by_epoch=False, gamma=0.81),
    ]
    saving = dict(type='CheckpointHook', by_epoch=False, interval=500, max_keep_ckpts=3)
    cfg = make_config(
        train_cfg=dict(type='IterBasedTrainLoop', **loop),
        param_scheduler=schedulers,
        default_hooks=dict(checkpoint=saving, logger=dict(type='LoggerHook', interval=50)),
    )
    note = enable_auto_accumulate(cfg)
    assert cfg.train_cfg.max_iters // accumulation(cfg) == 1000
    assert cfg.train_cfg.val_interval == 400 and cfg.train_cfg.dynamic_intervals == [(3600, 4000)]
    poly, steps, decay = cfg.param_scheduler
    assert (poly.begin, poly.end, poly.power) == (0, 4000, 0.9)
    assert steps.milestones == [2400, 3600]
    assert decay.gamma**4 == pytest.approx(0.81)
    assert (cfg.default_hooks.checkpoint.interval, cfg.default_hooks.checkpoint.max_keep_ckpts) == (2000, 3)
    assert cfg.default_hooks.logger.interval == 50
    assert 'train_cfg.max_iters 1000 -> 4000' in note
    # once more, as from the config that the run dumped, on other machines
    monkeypatch.setenv('WORLD_SIZE', '8')
    enable_auto_accumulate(cfg)
    assert (cfg.train_cfg.max_iters, cfg.param_scheduler[0].end, accumulation(cfg)) == (1000, 1000, 1)


def test_epochs_stay_and_the_warm_up_is_stretched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv('WORLD_SIZE', '1')
    cfg = make_config()
    enable_auto_accumulate(cfg)
    warm_up, drop = cfg.param_scheduler
    assert warm_up.end == 4000 and drop.milestones == [40] and cfg.train_cfg.max_epochs == 50


@pytest.mark.parametrize(('base', 'counts'), [(32, 8), (32, 1), (8, 3)])
def test_the_learning_rate_counts_accumulated_images(base: int, counts: int) -> None:
    optimizer = dict(optimizer=dict(type='SGD', lr=0.1), accumulative_counts=counts)
    cfg = make_config(optim_wrapper=optimizer, auto_scale_lr=dict(base_batch_size=base))
    for _ in range(2):  # once more, as with the config that the run dumped
        note = enable_auto_scale_lr(cfg)
        assert cfg.auto_scale_lr == dict(enable=True, base_batch_size=base / counts)
    assert (f'accumulates {counts} iterations' in note) == (counts > 1)
    logger: Any = MMLogger.get_current_instance()
    runner = SimpleNamespace(world_size=2, _train_dataloader=dict(batch_size=4), logger=logger, param_schedulers=None)
    wrapper = build_optim_wrapper(nn.Linear(1, 1), dict(optimizer, type='OptimWrapper'))
    Runner.scale_lr(runner, wrapper, cfg.auto_scale_lr)
    assert wrapper.get_lr()['lr'][0] == pytest.approx(0.1 * 2 * 4 * counts / base)
