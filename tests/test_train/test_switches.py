"""The command lines on classification configs."""

from __future__ import annotations

from pathlib import Path

import pytest
from mmengine.config import Config

from mmgate.errors import ConfigError
from mmgate.train import config_file
from mmgate.train.config_file import read_config
from mmgate.train.inputs import check_data
from mmgate.train.switches import enable_tta, enable_visualization


def test_without_mmpretrain_one_line_says_what_to_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_file, 'why_not', lambda package: f"{package}: no module named '{package}'")
    (tmp_path / 'config.py').write_text("default_scope = 'mmpretrain'")
    with pytest.raises(ConfigError, match=r"no module named 'mmpretrain'\. Type: pip install \"mmgate\[pretrain\]\""):
        read_config(str(tmp_path / 'config.py'))


@pytest.mark.parametrize(
    'dataset, missing',
    [
        (dict(type='ImageNet', data_root='', split='val'), None),  # knows its folders by the split
        (dict(type='CustomDataset', data_root='', data_prefix='images'), 'data_prefix: images'),
        (dict(type='CIFAR10', data_root='cifar', split='test'), None),  # mmpretrain downloads it
    ],
    ids=['ImageNet', 'folder', 'downloaded'],
)
def test_paths_of_image_folders(dataset: dict, missing: str | None) -> None:
    cfg = Config(dict(default_scope='mmpretrain', val_dataloader=dict(dataset=dataset), val_cfg=dict(a=1)))
    if missing is None:
        check_data(cfg, ('val',))
    else:
        with pytest.raises(ConfigError, match=missing):
            check_data(cfg, ('val',))


def test_flags_speak_to_mmpretrain() -> None:
    pipeline = [dict(type='LoadImageFromFile'), dict(type='PackInputs')]
    hooks = dict(visualization=dict(type='VisualizationHook', enable=False))
    cfg = Config(
        dict(
            default_scope='mmpretrain',
            default_hooks=hooks,
            model=dict(type='ImageClassifier'),
            test_dataloader=dict(dataset=dict(type='CustomDataset', pipeline=pipeline)),
        )
    )
    enable_visualization(cfg, show=False, show_dir='painted', wait_time=0)
    assert cfg.default_hooks.visualization.enable and cfg.default_hooks.visualization.out_dir == 'painted'
    enable_tta(cfg)
    assert cfg.model.type == 'AverageClsScoreTTA' and cfg.model.module.type == 'ImageClassifier'
    assert cfg.test_dataloader.dataset.pipeline[-1].transforms[1][0].type == 'PackInputs'
