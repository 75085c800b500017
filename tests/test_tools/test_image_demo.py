"""Inference on images, from a config or a name, with mmdet's and mmseg's inferencers."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from conftest import ROOT
from mmengine.config import Config
from mmengine.hub import get_config
from mmengine.registry import MODELS, init_default_scope

import mmgate  # noqa: F401
from mmgate.engine.preflight import ConfigError
from mmgate.tools import image_demo

DETECTOR = 'plug-deformable-detr-refine_r18_1xb8-12e_shapes'
SEGMENTOR = 'plug-mask2former_r18_1xb8-1k_shapes-128x128'
PATHS = {DETECTOR: f'mmgate::plug/deformable_detr/{DETECTOR}.py', SEGMENTOR: f'mmgate::plug/mask2former/{SEGMENTOR}.py'}


@pytest.fixture(scope='module')
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two images, what is none, and checkpoints of both demos."""
    folder = tmp_path_factory.mktemp('demo')
    (folder / 'images').mkdir()
    for name in ('a.jpg', 'b.png'):
        cv2.imwrite(str(folder / 'images' / name), np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8))
    (folder / 'images/notes.txt').write_text('none')
    (folder / 'empty').mkdir()
    (folder / 'empty/a.png').touch()
    for name, path in PATHS.items():
        cfg = get_config(path)
        init_default_scope(cfg.default_scope)
        meta = dict(dataset_meta=dict(cfg.metainfo, palette=[(40 * i, 0, 0) for i in range(6)]))
        torch.save(dict(state_dict=MODELS.build(cfg.model).state_dict(), meta=meta), folder / f'{name}.pth')
    return folder


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, '-W', 'ignore', str(ROOT / 'tools/image_demo.py'), *arguments, '--device', 'cpu']
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)


def test_detector(folder: Path, tmp_path: Path) -> None:
    arguments = ['--out-dir', str(tmp_path), '--pred-score-thr', '0.1', '--batch-size', '2', '--palette', 'random']
    result = run(folder, 'images', PATHS[DETECTOR], f'{DETECTOR}.pth', *arguments)
    assert result.returncode == 0, result.stderr[-2000:]
    assert sorted(path.name for path in (tmp_path / 'vis').iterdir()) == ['a.jpg', 'b.png']
    assert len(json.loads((tmp_path / 'preds/a.json').read_text())['scores']) == 30


def test_segmentor_by_name(folder: Path, tmp_path: Path) -> None:
    arguments = ['--weights', f'{SEGMENTOR}.pth', '--out-dir', str(tmp_path), '--opacity', '0.7']
    result = run(folder, 'images/*', SEGMENTOR, *arguments)
    assert result.returncode == 0, result.stderr[-2000:]
    assert sorted(path.name for path in (tmp_path / 'vis').iterdir()) == ['a.jpg', 'b.png']
    labels = cv2.imread(str(tmp_path / 'pred/00000000_pred.png'), cv2.IMREAD_GRAYSCALE)
    assert labels.shape == (64, 64) and labels.max() < 6


@pytest.mark.parametrize('name, pred', [(DETECTOR, 'preds'), (SEGMENTOR, 'pred')], ids=['det', 'seg'])
@pytest.mark.parametrize('skipped', [['vis'], ['pred'], ['vis', 'pred']], ids='-'.join)
def test_saves_what_is_wanted(folder: Path, tmp_path: Path, name: str, pred: str, skipped: list[str]) -> None:
    arguments = [f'--no-save-{each}' for each in skipped]
    inputs = [str(folder / 'images/a.jpg'), name, str(folder / f'{name}.pth')]
    image_demo.run([*inputs, '--device', 'cpu', '--out-dir', str(tmp_path), *arguments])
    assert (tmp_path / 'vis').exists() == ('vis' not in skipped)
    assert (tmp_path / pred).exists() == ('pred' not in skipped)


@pytest.mark.parametrize(
    'arguments, message',
    [
        (['nowhere', DETECTOR], 'nowhere is no image, no folder with images'),
        (['images', DETECTOR.replace('refine', 'refined')], f'Did you mean {DETECTOR}'),
        (['images', 'nowhere.py'], 'config nowhere.py does not exist'),
        (['images', DETECTOR, 'nowhere.pth'], 'checkpoint nowhere.pth does not exist'),
        (['images', DETECTOR, '--device', 'cuda:99'], 'cuda:99: torch sees'),
        (['images', DETECTOR, '--device', 'gpu'], '--device gpu: give'),
        (['images', DETECTOR, '--palette', 'zzz'], '--palette zzz is of no data set that mmdet'),
        (['images', SEGMENTOR, '--palette', 'zzz'], '--palette zzz is of no data set that mmseg'),
        (['images', SEGMENTOR, f'{DETECTOR}.pth', '--device', 'cpu'], 'EncoderDecoder .*It is of another model'),
        (['empty', DETECTOR, f'{DETECTOR}.pth', '--device', 'cpu'], 'empty/a.png is no image that can be read'),
    ],
    ids=[
        *('images', 'name', 'config', 'checkpoint', 'no such gpu', 'no device', 'palette', 'palette of maps'),
        *('another model', 'empty'),
    ],
)
def test_refuses(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(ConfigError, match=message):
        image_demo.run([*arguments, '--out-dir', str(tmp_path)])


def test_what_is_no_fault_of_an_image_stays_as_it_is(folder: Path) -> None:
    with pytest.raises(RuntimeError, match='out of memory'), image_demo.named_images([str(folder / 'empty/a.png')]):
        raise RuntimeError('CUDA out of memory')


def test_the_default_of_the_palettes_may_be_said() -> None:
    image_demo.check_inputs(
        ['a.jpg'], argparse.Namespace(device=None, palette='none', no_save_pred=True), segments=False
    )


def test_results_that_overwrite_one_another_are_said(folder: Path, tmp_path: Path) -> None:
    for suffix in ('.jpg', '.png'):
        shutil.copy(folder / 'images/b.png', tmp_path / f'same{suffix}')
    with pytest.warns(UserWarning, match='several images are called same'):
        arguments = [DETECTOR, str(folder / f'{DETECTOR}.pth'), '--device', 'cpu', '--no-save-vis']
        image_demo.run([str(tmp_path), *arguments, '--out-dir', str(tmp_path / 'out')])


def test_a_config_may_be_a_file(folder: Path, tmp_path: Path) -> None:
    (tmp_path / 'mine.py').write_text(f"_base_ = '{PATHS[DETECTOR]}'\nmodel = dict(num_queries=20)")
    cfg, weights = image_demo.read_model(str(tmp_path / 'mine.py'))
    assert isinstance(cfg, Config) and cfg.model.num_queries == 20 and weights is None


def test_a_checkpoint_of_another_model_draws_nothing(folder: Path, tmp_path: Path) -> None:
    torch.save({'state_dict': {'backbone.unknown': torch.zeros(1)}}, tmp_path / 'other.pth')
    result = run(folder, 'images', PATHS[DETECTOR], str(tmp_path / 'other.pth'), '--out-dir', str(tmp_path / 'out'))
    assert result.returncode == 2 and '0 of 224 keys of DeformableDETR were loaded' in result.stderr
    assert not (tmp_path / 'out').exists()
