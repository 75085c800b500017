"""Files of whole models: what they hold, what they take, and that they find what PyTorch finds, by metrics, too."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from helpers.exported import FAMILIES, batches, build, exports
from shapes import write_shapes

from mmgate.deploy.export import SUFFIXES, export
from mmgate.deploy.runtime import Exported

pytestmark = [exports, pytest.mark.slow]
PROGRAMS = ('plug-deformable-detr', 'plug-mask2former', 'agent-semantic-fpn', 'saga-mask-rcnn')  # of torch.export
CASES = [(name, 'onnx') for name in FAMILIES] + [(name, 'torch-export') for name in PROGRAMS]
BY_32 = {'agent-retinanet', 'saga-retinanet', 'saga-mask-rcnn', 'saga-upernet'}  # the others take any size


@pytest.fixture(scope='module')
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp('exported')


@pytest.mark.parametrize(('name', 'format'), CASES)
def test_finds_what_pytorch_finds(name: str, format: str, folder: Path) -> None:
    if format == 'onnx':
        onnx = pytest.importorskip('onnx', reason='needs the extra "deploy"')
        pytest.importorskip('onnxruntime', reason='needs the extra "deploy"')
    path = folder / f'{name}{SUFFIXES[format]}'
    images = batches(name, folder)
    found = export(build(name), images, path, format=format)
    run = Exported(path, trusted=True)
    assert found.images == 5  # one by one, part of one, both in a batch
    assert run.notes['divisor'] == (32 if name in BY_32 else 1)
    if format == 'onnx':
        model = onnx.load(path)
        assert [(entry.domain, entry.version) for entry in model.opset_import if entry.domain == ''] == [('', 18)]
        assert not model.functions and {node.domain for node in model.graph.node} == {''}


# what is trained a little, on the images that it is tested on: a config, its metric and its least points, and options
TRAINED: dict[str, tuple[str, str, float, str]] = {
    'detector': (
        'plug/deformable_detr/plug-deformable-detr-refine_r18_1xb8-12e_shapes.py',
        'coco/bbox_mAP',
        0.001,
        'train_cfg.max_epochs=60 train_cfg.val_interval=100 optim_wrapper.optimizer.lr=1e-3',
    ),
    'segmentor': (
        'plug/mask2former/plug-mask2former_r18_1xb8-1k_shapes-128x128.py',
        'mIoU',
        0.1,  # mmseg counts in hundredths
        'train_cfg.max_iters=120 train_cfg.val_interval=1000',
    ),
}


def run(folder: Path, tool: str, *arguments: Any) -> str:
    command = [sys.executable, '-W', 'ignore', str(ROOT / 'tools' / tool), *map(str, arguments)]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=1800)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout + result.stderr


@pytest.mark.parametrize('kind', TRAINED)
def test_metrics_are_pytorchs(kind: str, tmp_path: Path) -> None:
    path, metric, points, options = TRAINED[kind]
    write_shapes(tmp_path / 'data/shapes', num_train=16, num_val=16, size=64)
    config = ROOT / 'configs' / path
    run(tmp_path, 'train.py', config, '--work-dir', 'work', '--cfg-options', 'param_scheduler=None', *options.split())
    (checkpoint,) = sorted((tmp_path / 'work').glob('*.pth'))[-1:]
    run(tmp_path, 'test.py', config, checkpoint, '--work-dir', 'pytorch')
    assert 'model.onnx is as PyTorch' in run(tmp_path, 'deploy/export.py', config, checkpoint, '--out', 'model.onnx')
    run(tmp_path, 'deploy/test.py', config, 'model.onnx', '--work-dir', 'exported')
    expected, found = (
        json.loads(path.read_text()) for work in ('pytorch', 'exported') for path in (tmp_path / work).glob('*/*.json')
    )
    assert expected[metric] > 10 * points, expected
    for key, value in expected.items():
        if key.startswith(('coco/', 'mIoU', 'aAcc', 'mAcc')):
            assert abs(found[key] - value) <= points, (key, value, found[key])
