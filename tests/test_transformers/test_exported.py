"""transformers' detectors with gates as ONNX files, compared with PyTorch by onnxruntime."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip('transformers', '5.20', reason='needs transformers: the extra "transformers"')
pytest.importorskip('onnx', reason='needs the extra "deploy"')
pytest.importorskip('onnxscript', reason='needs the extra "deploy"')
pytest.importorskip('onnxruntime', reason='needs the extra "deploy"')

import onnx
import onnxruntime
from conftest import ROOT
from helpers.hub_models import build, feed

import mmgate

OUTPUTS = ('logits', 'pred_boxes')
UNEVEN = dict(decoder_n_points=[3, 6, 3])  # as D-FINE is published
CASES: dict[str, dict[str, Any]] = dict(deformable_detr={}, rt_detr={}, d_fine=UNEVEN, rf_detr={})

PAGE = (ROOT / 'docs/hosts.md').read_text()
# Whose code allows any number of images.
ANY_NUMBER = ('deformable_detr', 'rf_detr')


def lively(name: str, **options: Any) -> nn.Module:
    """Return a model whose outputs depend on its image, and which chooses queries by scores that are apart."""
    model = build(name, **options)
    torch.manual_seed(2)
    with torch.no_grad():
        for part, parameter in model.named_parameters():
            if parameter.dim() > 1 and 'embed' not in part.rpartition('.')[0].rpartition('.')[2]:
                parameter.normal_(std=parameter[0].numel() ** -0.5)
            if 'bbox_embed' in part and parameter.dim() > 1:
                parameter.normal_(std=0.05)
    return model


def outputs(model: nn.Module, images: Tensor) -> list[Tensor]:
    with torch.no_grad():
        found = model(pixel_values=images)
    return [found[name] for name in OUTPUTS]


def largest(found: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest difference of rows ``(B, Q, ...)``, which stay in their order where no scores tie."""
    return max((a - b).abs().max().item() for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize('name', CASES)
def test_a_file_computes_what_the_gated_model_does(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written as the page has it."""
    model, images = lively(name, **CASES[name]), feed(name)['pixel_values']
    mmgate.swap_attention(model, dict(path='**', type='PLuGMultiScaleDeformableAttention'))
    names = [one.path for one in mmgate.list_attention(model) if 'PLuGMultiheadAttention' in one.gates]
    mmgate.swap_attention(model, dict(path=names, type='PLuGMultiheadAttention'))
    for parameter in mmgate.gate_parameters(model).values():
        nn.init.normal_(parameter, std=0.5)
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r'```python\n(.*?)```', PAGE.partition('## Export')[2].partition('## ')[0], re.S)
    any_number = 'dynamo=True, dynamic_shapes=dict(pixel_values={0: "batch"})' if name in ANY_NUMBER else 'dynamo=True'
    exec(code.replace('dynamo=True', any_number), dict(model=model, pixel_values=images))

    session = onnxruntime.InferenceSession('gated.onnx')
    other = torch.rand(images.shape, generator=torch.Generator().manual_seed(5))
    other = torch.cat([other, other.flip(-1)]) if name in ANY_NUMBER else other
    by_file = [torch.from_numpy(one) for one in session.run(OUTPUTS, dict(pixel_values=other.numpy()))]
    expected = outputs(model, other)
    assert largest(by_file, expected) < 1e-4
    # The image and the gates matter.
    assert largest(outputs(model, other.flip(-1)), expected) > 1e-2
    with mmgate.gates_disabled(model):
        assert largest(outputs(model, other), expected) > 1e-2

    file = onnx.load('gated.onnx')
    assert {node.domain for node in file.graph.node} == {''} and not file.functions
    assert 'GridSample' not in {node.op_type for node in file.graph.node}
