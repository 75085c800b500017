"""``--cfg-options``: accepted, warned of where it looks misspelt, refused where it cannot be merged."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from mmengine.config import Config

from mmgate.errors import ConfigError
from mmgate.train.config_file import merge_options


def make_config() -> Config:
    return Config(
        dict(
            model=dict(
                type='DINO', num_layers=6, encoder=dict(num_layers=6), test_cfg=dict(max_per_img=300), neck=[dict(a=1)]
            ),
            train_dataloader=dict(batch_size=2, dataset=dict(type='CocoDataset', scale=(3, 4))),
            optim_wrapper=dict(
                type='OptimWrapper',
                optimizer=dict(type='SGD', lr=0.1),
                paramwise_cfg=dict(custom_keys=dict(backbone=dict(lr_mult=0.1))),
                clip_grad=None,
            ),
            train_cfg=dict(max_epochs=1, val_interval=1),
            env_cfg=dict(dist_cfg=dict(backend='nccl')),
            custom_hooks=[],
        )
    )


@pytest.mark.parametrize(
    'key',
    [
        'train_dataloader.pin_memory',
        'optim_wrapper.paramwise_cfg.norm_decay_mult',
        'model.test_cfg.score_thr',
        'model.test_cfg.crop_size',
        'model.encoder.num_cp',
        'auto_scale_lr.enable',
        'env_cfg.resource_limit',
        'activation_checkpointing',
        'strategy.type',
        'randomness.seed',
        'resume',
        'model.num_layers',
        'model.neck.0.a',
        'model.neck.0.b',
        'optim_wrapper.accumulative_counts',
        'train_dataloader.dataset.indices',
        'a.key.of.ones.own',
    ],
)
def test_accepted_in_silence(key: str) -> None:
    cfg = make_config()
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        merge_options(cfg, {key: 1})
    node: Any = cfg
    for part in key.split('.'):
        node = node[int(part) if part.isdigit() else part]
    assert node == 1


@pytest.mark.parametrize(
    'key, meant',
    [
        ('modle.num_layers', 'model'),
        ('model.num_layer', 'model.num_layers'),
        ('model.neck.0.a1', None),
        ('train_dataloader.batch_sise', 'train_dataloader.batch_size'),
        ('max_epoch', None),
        ('train_cfg.max_epoch', 'train_cfg.max_epochs'),
        ('load_form', 'load_from'),
        ('model.test_cfg.max_per_image', 'model.test_cfg.max_per_img'),
    ],
)
def test_warned_of_where_a_neighbour_is_near(key: str, meant: str | None) -> None:
    cfg = make_config()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        merge_options(cfg, {key: 1})
    messages = [str(warning.message) for warning in caught]
    assert len(messages) == (meant is not None)
    assert all(f'Did you mean {meant!r}?' in message for message in messages)


@pytest.mark.parametrize(
    'key',
    [
        *('model.neck.1.a', 'model.neck.first', 'custom_hooks.0.type', 'optim_wrapper.optimizer.lr.x'),
        *('optim_wrapper.clip_grad.max_norm', 'train_dataloader.dataset.scale.0', 'model.neck.0'),
    ],
)
def test_refused_where_it_cannot_be_merged(key: str) -> None:
    with pytest.raises(ConfigError, match=f'--cfg-options {key} cannot be merged: .'):
        merge_options(make_config(), {key: 1})


def test_refused_where_two_options_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match='cannot be merged'):
        merge_options(make_config(), {'own': 1, 'own.key': 2})
