"""Missing data, checkpoints, configs and devices: what is refused, and how it is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from mmdet.datasets import CocoDataset
from mmengine.config import Config
from mmengine.runner import Runner

from mmgate.errors import ConfigError
from mmgate.train import cli
from mmgate.train.config_file import type_name
from mmgate.train.inputs import check_checkpoint, check_data, check_pretrained


def make_config(**changes) -> Config:
    dataset = dict(
        type='CocoDataset', data_root='/nowhere/', ann_file='a.json', data_prefix=dict(img='train/'), pipeline=[]
    )
    cfg = dict(
        default_scope='mmdet',
        model=dict(type='FasterRCNN', backbone=dict(type='ResNet', depth=50), init_cfg=dict(), test_cfg=dict(nms=1)),
        train_dataloader=dict(batch_size=2, dataset=dataset),
        train_cfg=dict(max_epochs=1),
        test_dataloader=dict(dataset=dataset),
        test_cfg=dict(type='TestLoop'),
        test_evaluator=dict(type='CocoMetric', ann_file='/nowhere/b.json'),
        optim_wrapper=dict(type='OptimWrapper', optimizer=dict(type='SGD', lr=0.1)),
        default_hooks=dict(visualization=dict(type='DetVisualizationHook')),
        auto_scale_lr=dict(base_batch_size=16),
    )
    return Config({**cfg, **changes})


@pytest.mark.parametrize(
    ('kind', 'name'),
    [('AmpOptimWrapper', 'AmpOptimWrapper'), ('mmengine.AmpOptimWrapper', 'AmpOptimWrapper'), (Runner, 'Runner')],
)
def test_types_as_names_and_as_classes(kind: Any, name: str) -> None:
    """Configs in Python's style have classes."""
    assert type_name(dict(type=kind)) == name


def test_checkpoints(tmp_path) -> None:
    good, cut, text = (tmp_path / name for name in ('good.pth', 'cut.pth', 'text.pth'))
    torch.save(dict(state_dict={}, meta=dict(x=object)), good)
    check_checkpoint(str(good))
    check_checkpoint('https://example.org/x.pth')
    torch.save({}, tmp_path / 'old.pth', _use_new_zipfile_serialization=False)
    check_checkpoint(str(tmp_path / 'old.pth'))
    cut.write_bytes(good.read_bytes()[:-30])
    text.write_text('<html>')
    shards = tmp_path / 'epoch_1.pth'
    shards.mkdir()
    torch.save({}, shards / 'rank0.pth')
    check_checkpoint(str(shards), sharded=True)
    with pytest.raises(ConfigError, match='is a folder'):
        check_checkpoint(str(shards))
    for path, message in ((cut, 'cut short'), (text, 'no torch checkpoint'), (tmp_path / 'none.pth', 'does not exist')):
        with pytest.raises(ConfigError, match=message):
            check_checkpoint(str(path))


def test_amp() -> None:
    cfg = make_config()
    cli.enable_amp(cfg)
    assert cfg.optim_wrapper.type == 'AmpOptimWrapper' and cfg.optim_wrapper.loss_scale == 'dynamic'
    with pytest.warns(UserWarning, match='already'):
        cli.enable_amp(cfg)
    cfg.optim_wrapper.type = 'ApexOptimWrapper'
    with pytest.raises(ConfigError, match='ApexOptimWrapper'):
        cli.enable_amp(cfg)


@pytest.mark.parametrize('command', [cli.train, cli.test])
def test_help(command, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit, match='0'):
        command(['--help'])
    assert '--cfg-options' in capsys.readouterr().out


@pytest.mark.parametrize(
    'content, message',
    [(None, 'does not exist'), ('model = dict(', 'cannot be read'), ('_base_ = "nope.py"', 'cannot be read')],
    ids=['missing', 'syntax', 'base'],
)
def test_bad_config_files(tmp_path, capsys: pytest.CaptureFixture, content: str | None, message: str) -> None:
    path = tmp_path / 'config.py'
    if content is not None:
        path.write_text(content)
    assert cli.main(cli.train, [str(path), '--work-dir', str(tmp_path / 'work')]) == 2
    error = capsys.readouterr().err
    assert error.startswith('error: ') and message in error
    assert not (tmp_path / 'work').exists()


def test_data_that_no_loop_reads_may_be_missing() -> None:
    loader = dict(dataset=dict(type='CocoDataset', ann_file='nowhere.json'))
    check_data(
        Config(dict(val_dataloader=loader, val_cfg=None, test_dataloader=None, test_cfg=dict())), ['val', 'test']
    )
    with pytest.raises(ConfigError, match=r'val_dataloader\.dataset\.ann_file.*nowhere\.json'):
        check_data(Config(dict(default_scope='mmdet', val_dataloader=loader, val_cfg=dict())), ['val'])


class NamesASplit(CocoDataset):
    """Finds its files otherwise."""


@pytest.mark.parametrize(
    ('dataset', 'missing'),
    [
        (dict(type='CocoDataset', data_root='nowhere', ann_file='a.json'), 'data_root: nowhere'),
        (dict(type='CocoDataset', ann_file='HERE', data_prefix=dict(img='nowhere')), None),  # files may be named whole
        (dict(type='CocoDataset', data_root='nowhere', ann_file='HERE', data_prefix=dict(img='/')), None),
        (dict(type=NamesASplit, ann_file='val'), None),
        (dict(type='mmseg.ADE20KDataset', data_prefix=dict(img_path='nowhere')), 'data_prefix.img_path: nowhere'),
        (dict(type='mmseg.ADE20KDataset', data_prefix=dict(img_path='/', seg_map_path='nowhere')), None),
        (dict(type='ConcatDataset', datasets=[dict(type='CocoDataset', ann_file='a.json')]), 'datasets.0.ann_file: a'),
        (dict(type='RepeatDataset', dataset=dict(type='CocoDataset', data_root='no')), 'dataset.dataset.data_root: no'),
        (dict(type='CocoDataset', data_root='s3://bucket', ann_file='a.json'), None),
    ],
)
def test_what_is_read_has_to_be_there(dataset: dict, missing: str | None, tmp_path: Path) -> None:
    (tmp_path / 'a.json').touch()
    dataset = {key: str(tmp_path / 'a.json') if value == 'HERE' else value for key, value in dataset.items()}
    cfg = Config(dict(default_scope='mmdet', train_dataloader=dict(dataset=dataset), train_cfg=dict()))
    if missing is None:
        check_data(cfg, ['train'])
    else:
        with pytest.raises(ConfigError, match=f'{missing}.* does not exist'):
            check_data(cfg, ['train'])


def test_missing_pretrained_weights(tmp_path) -> None:
    def config(checkpoint: str) -> Config:
        return Config(dict(model=dict(backbone=dict(init_cfg=dict(type='Pretrained', checkpoint=checkpoint)))))

    with pytest.raises(ConfigError, match=r'model\.backbone\.init_cfg\.checkpoint: .*init_cfg=None'):
        check_pretrained(config('checkpoints/agent_pvt_t.pth'))
    weights = tmp_path / 'weights.pth'
    torch.save({}, weights)
    for present in (str(weights), 'torchvision://resnet50', 'https://example.org/weights.pth'):
        check_pretrained(config(present))
