"""Exports: attempts, and files that find what PyTorch finds, on a data set, too."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT
from helpers.exported import FAMILIES, batches, build, exports
from shapes import write_shapes
from torch import Tensor, nn

from mmgate.deploy import export as exporting
from mmgate.deploy.build import build_network
from mmgate.deploy.compare import compare
from mmgate.deploy.export import check_environment, export, write
from mmgate.deploy.network import Network
from mmgate.deploy.runtime import Exported
from mmgate.errors import ConfigError
from mmgate.gates import PLuGMultiScaleDeformableAttention

BY_32 = {'agent-retinanet', 'saga-retinanet', 'saga-mask-rcnn', 'saga-upernet'}  # the others take any size


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
    model = build(name)
    found = export(model, images, path)
    assert found.compared == '2 of 2 images, part of one, two as one batch'
    assert Exported(path).notes['divisor'] == (32 if name in BY_32 else 1)
    file = onnx.load(path)
    assert [(entry.domain, entry.version) for entry in file.opset_import if entry.domain == ''] == [('', 18)]
    assert not file.functions and {node.domain for node in file.graph.node} == {''}
    assert 'GridSample' not in {node.op_type for node in file.graph.node}
    if name in ('plug-deformable-detr-twostage', 'agent-mask-rcnn'):
        pytest.importorskip('openvino', reason='needs the extra "deploy"')
        found = compare(model, build_network(model), Exported(path, 'openvino'), images)
        assert found.detections and found.tolerated(), str(found)


SHAPES = ROOT / 'configs/plug/mask2former/plug-mask2former_r18_1xb8-1k_shapes-128x128.py'
TRAINING = ['param_scheduler=None', 'train_cfg.max_iters=120', 'train_cfg.val_interval=1000']


@exports
@pytest.mark.slow
def test_metrics_are_pytorchs_in_both_runtimes(tmp_path: Path) -> None:
    def run(tool: str, *arguments: Any) -> None:
        command = [sys.executable, '-W', 'ignore', str(ROOT / 'tools' / tool), SHAPES, *arguments]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=1800)

    def metrics(folder: str) -> dict[str, float]:
        (path,) = (tmp_path / folder).glob('*/*.json')
        return {key: value for key, value in json.loads(path.read_text()).items() if key in ('mIoU', 'aAcc', 'mAcc')}

    write_shapes(tmp_path / 'data/shapes', num_train=16, num_val=16, size=64)
    run('train.py', '--work-dir', 'work', '--cfg-options', *TRAINING)
    (checkpoint,) = (tmp_path / 'work').glob('*.pth')
    run('test.py', checkpoint, '--work-dir', 'pytorch')
    run('deploy/export.py', checkpoint, '--out', 'model.onnx')
    run('deploy/test.py', 'model.onnx', '--work-dir', 'exported')
    run('deploy/test.py', 'model.onnx', '--runtime', 'openvino', '--work-dir', 'openvino')
    expected = metrics('pytorch')
    assert expected['mIoU'] > 1  # of 100
    assert metrics('exported') == pytest.approx(expected, abs=0.1) == metrics('openvino')


class Levels(Network):
    """Gated attention over two levels of an image, whose sizes mmdet would read."""

    inputs = ('images',)
    outputs = ('tokens',)

    def __init__(self) -> None:
        super().__init__(nn.Identity())
        self.attention = PLuGMultiScaleDeformableAttention(16, 2, num_levels=2, num_points=[3, 6], init='paper')
        for parameter in self.attention.parameters():
            nn.init.normal_(parameter, std=0.5)

    def forward(self, images: Tensor) -> tuple[Tensor]:
        maps = [F.avg_pool2d(images, side) for side in (2, 4)]
        sizes = torch.cat([torch._shape_as_tensor(map_)[2:] for map_ in maps]).view(-1, 2)
        starts = torch.cat([sizes.new_zeros(1), sizes.prod(1).cumsum(0)[:-1]])
        points = torch.cat(
            [torch.stack([torch.linspace(0.0, 1.0, h * w), torch.linspace(1.0, 0.0, h * w)], -1) for h, w in sizes]
        )
        tokens = torch.cat([map_.flatten(2) for map_ in maps], 2).permute(2, 0, 1)  # (S, B, C)
        reference = points[None, :, None].expand(tokens.shape[1], -1, 2, -1)
        options = dict(reference_points=reference, spatial_shapes=sizes, level_start_index=starts)
        return (self.attention(tokens, value=tokens, **options),)


@exports
def test_deformable_attention_of_any_size(tmp_path: Path) -> None:
    onnx = pytest.importorskip('onnx', reason='needs the extra "deploy"')
    pytest.importorskip('onnxruntime', reason='needs the extra "deploy"')
    net, path = Levels().eval(), tmp_path / 'sampled.onnx'
    assert write(net, (torch.randn(2, 16, 16, 24),), path, 1) == 'images of any sides from 16 pixels on'
    for shape in ((2, 16, 16, 24), (1, 16, 36, 16), (3, 16, 17, 21)):
        images = torch.randn(shape)
        with torch.no_grad():
            torch.testing.assert_close(Exported(path)(images)[0], net(images)[0], rtol=1e-4, atol=1e-5)
    assert 'GridSample' not in {node.op_type for node in onnx.load(path).graph.node}


class Fake(nn.Module):
    def preprocess(self, batch: dict[str, list[Tensor]]) -> tuple[Tensor, ...]:
        return (batch['inputs'][0][None],)


@exports
def test_attempts_leave_the_file_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a line; the last file that agrees is kept, and nothing of one that is refused or ended by hand."""
    good: list[str] = []

    def write_file(net: object, inputs: object, path: Path, divisor: int) -> str:
        path.write_bytes(b'new')
        if divisor == 32:
            raise RuntimeError('its sizes are fixed')
        return str(divisor)

    def compared(model: object, images: object, path: Path, threshold: float) -> str:
        if good == ['stop']:
            raise KeyboardInterrupt
        if not good:
            raise ConfigError('it differs')
        return 'compared'

    lines: list[str] = []
    fakes = dict(check_environment=print, check_finds_something=lambda *_: None, build_network=lambda model: Fake())
    fakes |= dict(write=write_file, _compared=compared, print_log=lambda line, logger: lines.append(line))
    for name, function in fakes.items():
        monkeypatch.setattr(exporting, name, function)
    path = tmp_path / 'm.onnx'
    path.write_bytes(b'earlier')
    images = [dict(inputs=[torch.zeros(3, 64, 96)])]
    with pytest.raises(ConfigError, match='Identity cannot be exported: ConfigError: it differs'):
        export(nn.Identity(), images, path)
    expected = (
        r'attempt 1 of 3: images of any size$',
        r'not to be written for images of any size: .*it differs',
        r'attempt 2 of 3: images of sides that 32 divides',
        r'not to be written for images of sides that 32 divides: .*its sizes are fixed',
        r'attempt 3 of 3: images of one size$',
        r'not to be written for images of one size: .*it differs',
    )
    for line, pattern in zip(lines, expected, strict=True):
        assert re.search(pattern, line), line
    good[:] = ['stop']
    with pytest.raises(KeyboardInterrupt):
        export(nn.Identity(), images, path)
    assert path.read_bytes() == b'earlier' and list(tmp_path.iterdir()) == [path]
    good[:] = ['yes']
    assert export(nn.Identity(), images, path, fixed_size=True) == 'compared' and path.read_bytes() == b'new'
    assert lines[-1] == 'm.onnx takes 0, up to 64 at a time'


@pytest.mark.parametrize('version', ['2.1.2', '2.8.0+cpu'])
def test_an_older_torch_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, '__version__', version)
    with pytest.raises(ConfigError, match=r'needs torch 2\.9 or newer, this is 2.*: .* maintained forks'):
        check_environment()


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, '__version__', '2.9.0')
    monkeypatch.setattr(exporting, 'why_not', lambda package: None if package == 'onnx' else 'missing')
    with pytest.raises(ConfigError, match=r'needs onnxscript, onnxruntime: pip install "mmgate\[deploy\]"'):
        check_environment()
