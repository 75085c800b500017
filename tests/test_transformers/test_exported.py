"""transformers' detectors with gates as ONNX files, compared with PyTorch by onnxruntime."""

from __future__ import annotations

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
from helpers.hub_models import build, feed

import mmgate
from mmgate.deploy.to_onnx import export_onnx

OUTPUTS = ('logits', 'pred_boxes')
UNEVEN = dict(decoder_n_points=[3, 6, 3])  # as D-FINE is published
# beside Deformable DETR, which test_pages.py exports as docs/transformers.md does
CASES: dict[str, dict[str, Any]] = dict(
    rt_detr={},
    rt_detr_v2={},
    d_fine=UNEVEN,
    deimv2=UNEVEN,
    rf_detr={},
)


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
def test_a_file_computes_what_the_gated_model_does(name: str, tmp_path: Path) -> None:
    model, images = lively(name, **CASES[name]), feed(name)['pixel_values']
    rules = [dict(path='**', type='PLuGMultiScaleDeformableAttention')]
    mmgate.swap_attention(model, rules)
    names = [one.path for one in mmgate.list_attention(model) if 'PLuGMultiheadAttention' in one.gates]
    mmgate.swap_attention(model, dict(path=names, type='PLuGMultiheadAttention'))
    for parameter in mmgate.gate_parameters(model).values():
        nn.init.normal_(parameter, std=0.5)
    path = tmp_path / 'gated.onnx'
    found = export_onnx(model, dict(pixel_values=images), path, outputs=OUTPUTS)
    assert set(found) == set(OUTPUTS) and max(found.values()) < 1e-4

    session = onnxruntime.InferenceSession(path)
    other = torch.rand(images.shape, generator=torch.Generator().manual_seed(5))
    by_file = [torch.from_numpy(one) for one in session.run(None, dict(pixel_values=other.numpy()))]
    expected = outputs(model, other)
    assert largest(by_file, expected) < 1e-4
    # The image and the gates matter.
    assert largest(outputs(model, images), expected) > 1e-2
    with mmgate.gates_disabled(model):
        assert largest(outputs(model, other), expected) > 1e-2

    file = onnx.load(path)
    assert {node.domain for node in file.graph.node} == {''} and not file.functions
    assert 'GridSample' not in {node.op_type for node in file.graph.node}


def test_vanilla_attention_is_written_alike(tmp_path: Path) -> None:
    model, images = lively('rt_detr'), feed('rt_detr')['pixel_values']
    export_onnx(model, dict(pixel_values=images), tmp_path / 'vanilla.onnx', outputs=OUTPUTS)
    assert not [node for node in onnx.load(tmp_path / 'vanilla.onnx').graph.node if node.op_type == 'GridSample']
    assert not [one for one in mmgate.list_attention(model) if one.gate]
