"""Files of whole models: what they hold, what they take, and that they find what PyTorch finds."""

from __future__ import annotations

from pathlib import Path

import pytest
from exported import FAMILIES, batches, build, exports

from mmgate.deploy.export import SUFFIXES, export
from mmgate.deploy.runtime import Exported

pytestmark = [exports, pytest.mark.slow]
CASES = [(name, format) for name in FAMILIES for format in ('onnx', 'torch-export')]
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
