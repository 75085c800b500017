"""The page about other packages' models, run block by block as a reader does; models are small."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT

pytest.importorskip('transformers', '5.20', reason='needs transformers: the extra "transformers"')

from helpers.hub_models import build, feed, largest_difference
from torch import Tensor, nn

import mmgate

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(ROOT / 'tools/dev')
    import host_table

PAGE = (ROOT / 'docs/hosts.md').read_text()


def blocks(*sections: str) -> list[str]:
    """Return the code of the page's sections; '' is its beginning."""
    parts = {part.partition('\n')[0]: part for part in ('\n' + PAGE.partition('\n')[2]).split('\n## ')}
    return [block for name in sections for block in re.findall(r'```python\n(.*?)```', parts[name], re.S)]


@pytest.fixture(autouse=True)
def _scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_hosts(capsys: pytest.CaptureFixture[str]) -> None:
    model = build('deformable_detr')
    (block,) = blocks('')
    exec(block, dict(model=model))
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 6 and printed[0].startswith('model.encoder.layers.0.self_attn DeformableDetrMultiscale')
    assert "'n_levels': 4" in printed[0] and 'PLuGMultiScaleDeformableAttention' in printed[0]
    assert len([one for one in mmgate.list_attention(model) if one.gate]) == 4


def test_transformers() -> None:
    for package in ('matplotlib', 'onnxscript', 'onnxruntime'):
        pytest.importorskip(package, reason='the page draws and exports')
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 255, (480, 640, 3), np.uint8)
    Image.fromarray(pixels).save('street.jpg')
    build('deformable_detr').save_pretrained('vanilla')
    space: dict[str, Any] = dict(feed('deformable_detr', padded=True))
    gates = []
    for block in blocks('transformers', 'Export', 'Declare a class', 'Look at sampling points'):
        exec(block, space)
        gates.append(len(mmgate.gate_parameters(space['model'])))
    written = {path.name for path in Path().iterdir()}
    assert {'gates.safetensors', 'gated', 'gated.onnx', 'points.png'} <= written
    # Of the encoder, the decoder and the queries at first, then of a checkpoint with the encoder's.
    assert gates[0] > gates[1] > 0


def test_the_table_of_hosts_is_what_the_adapters_say() -> None:
    pytest.importorskip('timm', reason='the table has its hosts')
    assert host_table.written() == PAGE, 'run python tools/dev/host_table.py'


def test_timm() -> None:
    pytest.importorskip('timm', reason='needs timm')
    space: dict[str, Any] = {}
    (block,) = blocks('timm')
    exec(block, space)
    assert len([one for one in mmgate.list_attention(space['model']) if one.gate]) == 12


OUTPUTS = ('logits', 'pred_boxes')
UNEVEN = dict(decoder_n_points=[3, 6, 3])  # as D-FINE is published
CASES: dict[str, dict[str, Any]] = dict(deformable_detr={}, d_fine=UNEVEN, rf_detr={})

# Whose code allows any number of images.
ANY_NUMBER = ('deformable_detr', 'rf_detr')


def detected(model: nn.Module, images: Tensor) -> list[Tensor]:
    with torch.no_grad():
        found = model(pixel_values=images)
    return [found[name] for name in OUTPUTS]


@pytest.mark.parametrize('name', CASES)
def test_an_exported_file_computes_what_the_gated_model_does(name: str) -> None:
    """Written as the page has it, and compared by ONNX Runtime."""
    pytest.importorskip('onnxscript', reason='needs the extra "deploy"')
    onnx = pytest.importorskip('onnx', reason='needs the extra "deploy"')
    onnxruntime = pytest.importorskip('onnxruntime', reason='needs the extra "deploy"')
    model, images = build(name, **CASES[name]), feed(name)['pixel_values']
    mmgate.swap_attention(model, dict(path='**', type='PLuGMultiScaleDeformableAttention'))
    names = [one.path for one in mmgate.list_attention(model) if 'PLuGMultiheadAttention' in one.gates]
    mmgate.swap_attention(model, dict(path=names, type='PLuGMultiheadAttention'))
    for parameter in mmgate.gate_parameters(model).values():
        nn.init.normal_(parameter, std=0.5)
    (code,) = blocks('Export')
    any_number = 'dynamo=True, dynamic_shapes=dict(pixel_values={0: "batch"})' if name in ANY_NUMBER else 'dynamo=True'
    exec(code.replace('dynamo=True', any_number), dict(model=model, pixel_values=images))

    session = onnxruntime.InferenceSession('gated.onnx')
    other = torch.rand(images.shape, generator=torch.Generator().manual_seed(5))
    other = torch.cat([other, other.flip(-1)]) if name in ANY_NUMBER else other
    by_file = [torch.from_numpy(one) for one in session.run(OUTPUTS, dict(pixel_values=other.numpy()))]
    expected = detected(model, other)
    assert largest_difference(by_file, expected) < 1e-4
    # The image and the gates matter.
    assert largest_difference(detected(model, other.flip(-1)), expected) > 1e-2
    with mmgate.gates_disabled(model):
        assert largest_difference(detected(model, other), expected) > 1e-2

    file = onnx.load('gated.onnx')
    assert {node.domain for node in file.graph.node} == {''} and not file.functions
    assert 'GridSample' not in {node.op_type for node in file.graph.node}
