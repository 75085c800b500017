"""Weights in the safetensors format, with mmengine's meta as JSON in the file's metadata or without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from mmengine.runner.checkpoint import CheckpointLoader

import mmgate  # noqa: F401
from mmgate.errors import ConfigError

save_file = pytest.importorskip('safetensors.torch', reason='no safetensors').save_file


def loaded(folder: Path, **metadata: str) -> dict[str, Any]:
    save_file(dict(weight=torch.ones(1)), folder / 'a.safetensors', metadata)
    return CheckpointLoader.load_checkpoint(str(folder / 'a.safetensors'))


def test_weights_of_anyone(tmp_path: Path) -> None:
    assert loaded(tmp_path) == dict(state_dict=dict(weight=torch.ones(1)), meta={})


def test_classes_and_palettes_are_tuples_again(tmp_path: Path) -> None:
    meta = dict(dataset_meta=dict(CLASSES=['a'], palette=[[0, 1, 2], [3, 4, 5]]), CLASSES=('a',))
    expected = dict(dataset_meta=dict(CLASSES=('a',), palette=[(0, 1, 2), (3, 4, 5)]), CLASSES=('a',))
    assert loaded(tmp_path, meta=json.dumps(meta))['meta'] == expected


def test_a_config_is_looked_at(tmp_path: Path) -> None:
    evil = json.dumps(dict(cfg="__import__('os').system('true')"))
    with pytest.raises(ConfigError, match='holds a config, cfg, with line 1, __import__'):
        loaded(tmp_path, meta=evil)


def test_what_is_no_such_file(tmp_path: Path) -> None:
    (tmp_path / 'a.safetensors').write_bytes(b'nonsense')
    with pytest.raises(ConfigError, match='cannot be read'):
        CheckpointLoader.load_checkpoint(str(tmp_path / 'a.safetensors'))


def test_metadata_of_another_form(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match='its metadata meta is no dictionary'):
        loaded(tmp_path, meta='[1]')
