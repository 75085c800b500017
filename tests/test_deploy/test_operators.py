"""Operators of ONNX files: suppression and RoIAlign, as mmcv has them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.exported import boxes_and_scores, exports
from torch import Tensor, nn

from mmgate.deploy.graph import write_onnx
from mmgate.deploy.network import Network
from mmgate.deploy.operators import nms_keep, roi_align
from mmgate.deploy.runtime import Exported


class Operators(Network):
    """Both operators, of images whose number and size are open."""

    inputs = ('images', 'boxes', 'scores', 'rois')
    outputs = ('kept', 'old', 'aligned')

    def forward(self, images: Tensor, boxes: Tensor, scores: Tensor, rois: Tensor) -> tuple[Tensor, ...]:
        aligned = roi_align(images, rois, 7, 5, 0.25, 0, True)
        return nms_keep(boxes, scores, 0.5).long(), roi_align(images, rois, 7, 5, 0.5, 2, False), aligned


@exports
def test_files_hold_mmcvs_operators(tmp_path: Path) -> None:
    pytest.importorskip('onnxruntime', reason='needs the extra "deploy"')

    def inputs(images: int, rois: int) -> tuple[Tensor, ...]:
        corner = torch.rand(rois, 2) * 110 - 10  # some reach beyond the map
        number = torch.randint(0, images, (rois, 1))
        found = boxes_and_scores()
        regions = torch.cat([number, corner, corner + torch.rand(rois, 2) * 70], 1)
        regions[0, 1:] = 0  # an empty place
        return torch.randn(images, 3, 24, 32), found.boxes[:images], found.scores[:images], regions

    network, batch = Operators(nn.Identity()), torch.export.Dim('batch')
    shapes = ({0: batch}, {0: batch}, {0: batch}, {0: torch.export.Dim('rois')})
    program = torch.export.export(network, inputs(2, 40), dynamic_shapes=shapes, strict=False)
    notes = dict(takes='any', divisor=1, least=1)
    write_onnx(program, network, tmp_path / 'operators.onnx', notes)
    run = Exported(tmp_path / 'operators.onnx')
    for tensors in (inputs(2, 40), inputs(1, 3)):
        for found, expected in zip(run(*tensors), network(*tensors), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
