"""Exports: attempts, and files that find what PyTorch finds, on a data set, too."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from helpers.exported import FAMILIES, batches, build, exports
from shapes import write_shapes
from torch import Tensor

from mmgate.deploy import export as exporting
from mmgate.deploy.export import export
from mmgate.deploy.runtime import Exported
from mmgate.errors import ConfigError

BY_32 = {'agent-retinanet', 'saga-retinanet', 'saga-mask-rcnn', 'saga-upernet'}  # the others take any size

Write = Callable[[Path, int], None]


@pytest.fixture(scope='module')
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp('exported')


@exports
@pytest.mark.slow
@pytest.mark.parametrize('name', FAMILIES)
def test_finds_what_pytorch_finds(name: str, folder: Path) -> None:
    onnx = pytest.importorskip('onnx', reason='needs the extra "deploy"')
    pytest.importorskip('onnxruntime', reason='needs the extra "deploy"')
    path = folder / f'{name}.onnx'
    images = batches(name, folder)
    found = export(build(name), images, path)
    run = Exported(path)
    assert found.images == 5  # one by one, part of one, both in a batch
    assert run.notes['divisor'] == (32 if name in BY_32 else 1)
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


@exports
@pytest.mark.slow
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


class Network(torch.nn.Module):
    def preprocess(self, batch: dict[str, list[Tensor]]) -> tuple[Tensor, ...]:
        return (batch['inputs'][0][None],)


@pytest.fixture
def export_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A function that exports a model whose graph, of sides with a divisor, is written by a function of its own."""

    def run(write: Write, *, size: tuple[int, int] = (64, 96), same: bool = True, **options: Any) -> Any:
        def write_graph(net: object, inputs: object, path: Path, *, divisor: int, **_: object) -> str:
            path.write_bytes(b'begun')
            write(path, divisor)
            return 'images'

        def compared(*_: object) -> str:
            if not same:
                raise ConfigError('it differs')
            return 'compared'

        fakes = dict(check_environment=print, check_finds_something=lambda *_: None)
        fakes |= dict(build_network=lambda model: Network())
        for name, function in (fakes | dict(write=write_graph, _compared=compared)).items():
            monkeypatch.setattr(exporting, name, function)
        batches = [dict(inputs=[torch.zeros(3, *size)])]
        return exporting.export(torch.nn.Identity(), batches, tmp_path / 'm.onnx', **options)

    return run


@exports
@pytest.mark.parametrize('size, tried', [((64, 96), [1, 32, 0]), ((64, 65), [1, 0])], ids=str)
def test_what_is_refused_leaves_the_file_that_was_there(
    size: tuple[int, int], tried: list[int], tmp_path: Path, export_by: Callable[..., Any]
) -> None:
    written: list[int] = []
    path = tmp_path / 'm.onnx'
    path.write_bytes(b'earlier')
    with pytest.raises(ConfigError, match='Identity cannot be exported: ConfigError: it differs'):
        export_by(lambda path, divisor: written.append(divisor), size=size, same=False)
    assert written == tried  # of one size where the graph of any may be at fault
    assert path.read_bytes() == b'earlier' and list(tmp_path.iterdir()) == [path]


@exports
def test_an_attempt_has_a_line_and_after_it_the_next(
    tmp_path: Path, export_by: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_unless_fixed(path: Path, divisor: int) -> None:
        if divisor:
            raise RuntimeError('its sizes are fixed')

    lines: list[str] = []
    monkeypatch.setattr(exporting, 'print_log', lambda line, logger: lines.append(line))
    assert export_by(fail_unless_fixed) == 'compared'
    assert [path.name for path in tmp_path.iterdir()] == ['m.onnx']
    expected = (
        r'attempt 1 of 3: images of any size \(--fixed-size',
        r'not to be written for images of any size: .*its sizes are fixed',
        r'attempt 2 of 3: images of sides that 32 divides',
        r'not to be written for images of sides that 32 divides: .*its sizes are fixed',
        r'attempt 3 of 3: images of one size$',
        r'm\.onnx takes images',
    )
    for line, pattern in zip(lines, expected, strict=True):
        assert re.search(pattern, line), line


@exports
def test_an_export_ended_by_hand_leaves_nothing(tmp_path: Path, export_by: Callable[..., Any]) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_by(interrupt)
    assert not list(tmp_path.iterdir())
