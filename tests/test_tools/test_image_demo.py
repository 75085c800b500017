"""Inference on images with mmdet's and mmseg's inferencers, by our command line and by a config's path."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from conftest import ROOT
from mmengine.hub import get_config, get_model
from mmengine.registry import MODELS, init_default_scope

import mmgate  # noqa: F401
from mmgate.errors import ConfigError
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
    arguments = ['--out-dir', str(tmp_path), '--pred-score-thr', '0.1', '--batch-size', '2']
    result = run(folder, 'images', PATHS[DETECTOR], f'{DETECTOR}.pth', *arguments)
    assert result.returncode == 0, result.stderr[-2000:]
    assert sorted(path.name for path in (tmp_path / 'vis').iterdir()) == ['a.jpg', 'b.png']
    assert len(json.loads((tmp_path / 'preds/a.json').read_text())['scores']) == 30


def test_segmentor(folder: Path, tmp_path: Path) -> None:
    arguments = [PATHS[SEGMENTOR], f'{SEGMENTOR}.pth', '--out-dir', str(tmp_path), '--opacity', '0.7']
    result = run(folder, 'images/*', *arguments)
    assert result.returncode == 0, result.stderr[-2000:]
    assert sorted(path.name for path in (tmp_path / 'vis').iterdir()) == ['a.jpg', 'b.png']
    labels = cv2.imread(str(tmp_path / 'pred/00000000_pred.png'), cv2.IMREAD_GRAYSCALE)
    assert labels.shape == (64, 64) and labels.max() < 6


@pytest.mark.parametrize(
    'arguments, message',
    [
        (['nowhere', PATHS[DETECTOR], f'{DETECTOR}.pth'], 'nowhere is no image, no folder with images'),
        (['images', 'nowhere.py', f'{DETECTOR}.pth'], 'config nowhere.py does not exist'),
        (['images', PATHS[DETECTOR], 'nowhere.pth'], 'checkpoint nowhere.pth does not exist'),
        (['images', PATHS[SEGMENTOR], f'{DETECTOR}.pth', '--device', 'cpu'], 'EncoderDecoder .*It is of another model'),
    ],
    ids=['images', 'config', 'checkpoint', 'another model'],
)
def test_refuses(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(ConfigError, match=message):
        image_demo.run([*arguments, '--out-dir', str(tmp_path)])


def test_a_checkpoint_of_another_model_draws_nothing(folder: Path, tmp_path: Path) -> None:
    torch.save({'state_dict': {'backbone.unknown': torch.zeros(1)}}, tmp_path / 'other.pth')
    result = run(folder, 'images', PATHS[DETECTOR], str(tmp_path / 'other.pth'), '--out-dir', str(tmp_path / 'out'))
    assert result.returncode == 2 and '0 of 224 keys of DeformableDETR were loaded' in result.stderr
    assert not (tmp_path / 'out').exists()


@pytest.mark.parametrize('name', [DETECTOR, SEGMENTOR], ids=['DetInferencer', 'MMSegInferencer'])
def test_the_inferencers_take_the_path_of_a_config(folder: Path, name: str) -> None:
    if name == DETECTOR:
        from mmdet.apis import DetInferencer as Inferencer
    else:
        from mmseg.apis import MMSegInferencer as Inferencer
    weights = folder / f'{name}.pth'
    model = Inferencer(get_config(PATHS[name]).filename, str(weights), device='cpu').model
    assert len(model.dataset_meta['classes']) == 6
    for key, value in torch.load(weights)['state_dict'].items():
        torch.testing.assert_close(model.state_dict()[key], value, equal_nan=True, msg=key)  # some are not drawn


@pytest.mark.parametrize(
    'path, kind, gate',
    [
        (PATHS[DETECTOR], 'DeformableDETR', 'PLuGMultiScaleDeformableAttention'),
        (PATHS[SEGMENTOR], 'EncoderDecoder', 'PLuGMultiheadAttention'),
        ('mmgate::agent/mask_rcnn/agent-mask-rcnn_pvt-demo_1xb8-8e_shapes.py', 'MaskRCNN', 'AgentAttention'),
    ],
    ids=['detector', 'segmentor', 'backbone'],
)
def test_the_hub_takes_our_configs(path: str, kind: str, gate: str) -> None:
    model = get_model(path)
    assert type(model).__name__ == kind
    assert any(type(module).__name__ == gate for module in model.modules())
