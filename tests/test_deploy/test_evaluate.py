"""The tools on real images: AP and mIoU of a file on its data set are PyTorch's, and so are boxes on photos."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from exported import FAMILIES, batches, build, exports
from shapes import write_shapes

from mmgate.deploy.export import export

pytest.importorskip('onnxruntime', reason='needs the extra "deploy"')
pytestmark = [exports, pytest.mark.slow]
PHOTOS = sorted((ROOT.parent / 'shared/data/coco_sample/val2017').glob('*.jpg'))
# what is trained a little, on the images that it is tested on: a config, its metric, and options
LONG = ['train_cfg.max_epochs=60', 'train_cfg.val_interval=100', 'param_scheduler=None']
TRAINED: dict[str, tuple[str, str, list[str]]] = {
    'detector': (
        'plug/deformable_detr/plug-deformable-detr-refine_r18_1xb8-12e_shapes.py',
        'coco/bbox_mAP',
        [*LONG, 'optim_wrapper.optimizer.lr=1e-3'],
    ),
    'instances': (
        'saga/mask_rcnn/saga-mask-rcnn_pvt-demo_1xb8-8e_shapes.py',
        'coco/segm_mAP',
        [*LONG, 'default_hooks.checkpoint.interval=60'],
    ),
    'segmentor': (
        'plug/mask2former/plug-mask2former_r18_1xb8-1k_shapes-128x128.py',
        'mIoU',
        ['train_cfg.max_iters=120', 'train_cfg.val_interval=1000', 'param_scheduler=None'],
    ),
}


def run(folder: Path, tool: str, *arguments: Any) -> str:
    command = [sys.executable, '-W', 'ignore', str(ROOT / 'tools' / tool), *map(str, arguments)]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=1800)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout + result.stderr


def metrics(work_dir: Path) -> dict[str, float]:
    (path,) = work_dir.glob('*/*.json')
    return json.loads(path.read_text())


@pytest.mark.parametrize('kind', TRAINED)
def test_metrics_are_pytorchs(kind: str, tmp_path: Path) -> None:
    path, metric, options = TRAINED[kind]
    write_shapes(tmp_path / 'data/shapes', num_train=16, num_val=16, size=64)
    config = ROOT / 'configs' / path
    run(tmp_path, 'train.py', config, '--work-dir', 'work', '--cfg-options', *options)
    (checkpoint,) = sorted((tmp_path / 'work').glob('*.pth'))[-1:]
    run(tmp_path, 'test.py', config, checkpoint, '--work-dir', 'pytorch')
    said = run(tmp_path, 'deploy/export.py', config, checkpoint, '--out', 'model.onnx')
    assert 'model.onnx is as PyTorch' in said
    run(tmp_path, 'deploy/test.py', config, 'model.onnx', '--work-dir', 'exported')
    expected, found = metrics(tmp_path / 'pytorch'), metrics(tmp_path / 'exported')
    points = 0.001 if kind != 'segmentor' else 0.1  # mmseg counts in hundredths
    assert expected[metric] > 10 * points, expected
    for key, value in expected.items():
        if key.startswith(('coco/', 'mIoU', 'aAcc', 'mAcc')):
            assert abs(found[key] - value) <= points, (key, value, found[key])


@pytest.mark.skipif(not PHOTOS, reason='the COCO sample is not there')
@pytest.mark.parametrize('name', ['plug-deformable-detr', 'plug-dino', 'agent-mask-rcnn', 'plug-mask2former'])
def test_boxes_on_photos_are_pytorchs(name: str, tmp_path: Path) -> None:
    assert name in FAMILIES
    photos = batches(name, tmp_path, images=PHOTOS, sizes=((320, 256), (256, 320)))
    found = export(build(name), photos, tmp_path / 'model.onnx')
    assert found.images >= 2 and found.pixels <= 0.1 and not found.missing, str(found)
