"""Exports: files that find what PyTorch finds, on a data set, too, in either runtime; attempts, and refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, TORCH, tool
from helpers.exported import FAMILIES, batches, build, exports
from shapes import write_shapes
from torch import Tensor, nn

from mmgate.deploy import export as exporting
from mmgate.deploy.build import build_network
from mmgate.deploy.compare import compare
from mmgate.deploy.export import check_environment, export, write
from mmgate.deploy.network import Network
from mmgate.deploy.operators import nms_keep, roi_align
from mmgate.deploy.runtime import RUNTIMES, Exported
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


class Operators(Network):
    """Suppression and RoIAlign, of images whose number and size are open."""

    inputs = ('images', 'boxes', 'scores', 'rois')
    outputs = ('kept', 'old', 'aligned')

    def forward(self, images: Tensor, boxes: Tensor, scores: Tensor, rois: Tensor) -> tuple[Tensor, ...]:
        rois = rois.flatten(0, 1)
        aligned = roi_align(images, rois, 7, 5, 0.25, 0, True)
        return nms_keep(boxes, scores, 0.5).long(), roi_align(images, rois, 7, 5, 0.5, 2, False), aligned


def images_of(*shape: int) -> tuple[Tensor, ...]:
    return (torch.randn(shape),)


def boxes_of(images: int, height: int, width: int) -> tuple[Tensor, ...]:
    corner = torch.rand(images, 20, 2) * 110 - 10  # some reach beyond the map
    boxes = torch.cat([corner, corner + torch.rand(images, 20, 2) * 70], -1)
    scores = torch.rand(images, 20)
    regions = torch.cat([torch.randint(0, images, (images, 20, 1)), boxes], -1)
    regions[0, 0, 1:] = 0  # an empty place
    return torch.randn(images, 3, height, width), boxes, torch.where(scores > 0.2, scores, -1.0), regions


@exports
@pytest.mark.parametrize(
    ('kind', 'first', 'others'),
    [
        pytest.param(
            *(Levels, images_of(2, 16, 16, 24), [images_of(1, 16, 36, 16), images_of(3, 16, 17, 21)]),
            marks=pytest.mark.skipif(TORCH < (2, 13), reason='older torch.export allows multiples of 4 alone'),
        ),
        (lambda: Operators(nn.Identity()), boxes_of(2, 24, 32), [boxes_of(1, 30, 25)]),
    ],
    ids=['deformable attention', 'suppression and alignment'],
)
def test_a_file_takes_images_of_any_size(kind: Any, first: Any, others: list, tmp_path: Path) -> None:
    onnx = pytest.importorskip('onnx', reason='needs the extra "deploy"')
    pytest.importorskip('onnxruntime', reason='needs the extra "deploy"')
    net, path = kind().eval(), tmp_path / 'small.onnx'
    least = min(first[0].shape[2:])
    assert write(net, first, path, 1) == f'images of any sides from {least} pixels on'
    run = Exported(path)
    for inputs in (first, *others):
        with torch.no_grad():
            for found, expected in zip(run(*inputs), net(*inputs), strict=True):
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert 'GridSample' not in {node.op_type for node in onnx.load(path).graph.node}
    with pytest.raises(ConfigError, match=f'takes images of any sides from {least} .* this batch has 8 x 40'):
        run(first[0].new_zeros(1, 3, 8, 40), *first[1:])


@pytest.mark.parametrize(
    ('notes', 'taken', 'refused'),
    [
        (dict(divisor=2, least=8), [(8, 10)], [(6, 10), (10, 6), (9, 10), (10, 9)]),
        (dict(divisor=0, size=[8, 10]), [(8, 10)], [(8, 12), (10, 8)]),
    ],
)
def test_sizes_that_a_file_takes(notes: dict[str, Any], taken: list, refused: list) -> None:
    run = object.__new__(Exported)
    run.notes = notes
    assert all(run.takes(*size) for size in taken) and not any(run.takes(*size) for size in refused)


@pytest.mark.parametrize(
    ('name', 'runtime', 'message'),
    [
        *(('model.pth', runtime, f'{runtime} cannot open .*model.pth: .') for runtime in RUNTIMES),
        ('model.pth', 'tensorrt', "runtime='tensorrt' is unknown; choose one of onnxruntime, openvino"),
    ],
)
def test_what_is_no_exported_file(name: str, runtime: str, message: str, tmp_path: Path) -> None:
    (tmp_path / 'model.pth').write_bytes(b'')
    with pytest.raises(ConfigError, match=message):
        Exported(tmp_path / name, runtime)


@exports
@pytest.mark.parametrize(
    ('name', 'arguments', 'reason'),
    [
        ('export', ['no.pth', '--out', 'file/a.onnx'], 'nothing can be written to .*file'),
        ('export', ['no.pth', '--out', 'a.pt2'], r'a\.pt2: an ONNX file ends with \.onnx'),
        ('test', ['missing.onnx', '--runtime', 'openvino'], r'exported file missing\.onnx does not exist'),
    ],
)
def test_tools_refuse_before_they_read_a_config(
    name: str, arguments: list[str], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip('onnxruntime', reason='needs the extra "deploy"')
    monkeypatch.chdir(tmp_path)
    Path('file').write_text('')
    with pytest.raises(ConfigError, match=reason):
        tool(name, 'deploy').main(['no-config.py', *arguments])


@exports
def test_attempts_leave_the_file_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any size is tried, then multiples of 32, then one size; nothing is left of one that is refused or interrupted."""
    pytest.importorskip('onnxruntime', reason='needs the extra "deploy"')
    errors: list[BaseException] = [*(ConfigError('it differs') for _ in range(3)), KeyboardInterrupt('stop')]
    tried: list[int] = []

    def write_file(net: object, inputs: object, path: Path, divisor: int) -> str:
        tried.append(divisor)
        path.write_bytes(b'new')
        return 'some images'

    def compared(*_: object) -> str:
        if errors:
            raise errors.pop(0)
        return 'compared'

    net: Any = SimpleNamespace(preprocess=lambda batch: (batch['inputs'][0][None],))
    fakes = dict(build_network=lambda model: net, write=write_file, _compared=compared)
    for name, fake in dict(fakes, check_finds_something=lambda *_: None).items():
        monkeypatch.setattr(exporting, name, fake)
    call, path = (nn.Identity(), [dict(inputs=[torch.zeros(3, 64, 96)])]), tmp_path / 'm.onnx'
    path.write_bytes(b'earlier')
    for error, said in ((ConfigError, 'Identity cannot be exported: ConfigError: it differs'), (KeyboardInterrupt, '')):
        with pytest.raises(error, match=said):
            export(*call, path)
        assert path.read_bytes() == b'earlier' and list(tmp_path.iterdir()) == [path]
    assert export(*call, path, fixed_size=True) == 'compared' and path.read_bytes() == b'new'
    assert tried == [1, 32, 0, 1, 0]


@pytest.mark.parametrize(
    ('version', 'message'),
    [
        ('2.8.0+cpu', r'needs torch 2\.9 or newer, this is 2.*: .* maintained forks'),
        ('2.9.0', r'needs onnxscript, onnxruntime: pip install "mmgate\[deploy\]"'),
    ],
)
def test_what_an_export_needs(version: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, '__version__', version)
    monkeypatch.setattr(exporting, 'why_not', lambda package: None if package == 'onnx' else 'missing')
    with pytest.raises(ConfigError, match=message):
        check_environment()
