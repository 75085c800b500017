"""Files of whole models: what they hold, what they take, and that they find what PyTorch finds."""

from __future__ import annotations

from pathlib import Path

import pytest
from exported import FAMILIES, batches, build, exports

from mmgate.deploy.export import SUFFIXES, export
from mmgate.deploy.runtime import Exported

pytestmark = exports
QUICK = (('plug-deformable-detr', 'onnx'),)  # of the demo
CASES = [(name, format) for name in FAMILIES for format in ('onnx', 'torch-export')]
ANY_SIZE = {name for name in FAMILIES if 'detr' in name or 'dino' in name or 'mask2former' in name}


@pytest.fixture(scope='module')
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp('exported')


@pytest.mark.parametrize(
    ('name', 'format'), [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in CASES]
)
def test_finds_what_pytorch_finds(name: str, format: str, folder: Path) -> None:
    if format == 'onnx':
        onnx = pytest.importorskip('onnx', reason='needs the extra "deploy"')
        pytest.importorskip('onnxruntime', reason='needs the extra "deploy"')
    path = folder / f'{name}{SUFFIXES[format]}'
    images = batches(name, folder)
    found = export(build(name), images, path, format=format)
    run = Exported(path, trusted=True)
    assert found.images == (5 if run.notes['divisor'] else 4)  # one by one, part of one, both in a batch
    assert run.notes['divisor'] == 1 or name not in ANY_SIZE
    if format == 'onnx':
        model = onnx.load(path)
        assert [(entry.domain, entry.version) for entry in model.opset_import if entry.domain == ''] == [('', 18)]
        assert not model.functions and {node.domain for node in model.graph.node} == {''}
