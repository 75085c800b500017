"""Operators of ONNX files: suppression and RoIAlign, as mmcv has them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.exported import boxes_and_scores, exports
from torch import Tensor, nn

from mmgate.deploy.export import write
from mmgate.deploy.network import Network
from mmgate.deploy.operators import nms_keep, roi_align
from mmgate.deploy.runtime import Exported


class Operators(Network):
    """Both operators, of images whose number and size are open."""

    inputs = ('images', 'boxes', 'scores', 'rois')
    outputs = ('kept', 'old', 'aligned')

    def forward(self, images: Tensor, boxes: Tensor, scores: Tensor, rois: Tensor) -> tuple[Tensor, ...]:
        rois = rois.flatten(0, 1)
        aligned = roi_align(images, rois, 7, 5, 0.25, 0, True)
        return nms_keep(boxes, scores, 0.5).long(), roi_align(images, rois, 7, 5, 0.5, 2, False), aligned


@exports
def test_files_hold_mmcvs_operators(tmp_path: Path) -> None:
    pytest.importorskip('onnxruntime', reason='needs the extra "deploy"')

    def inputs(images: int, height: int, width: int) -> tuple[Tensor, ...]:
        corner = torch.rand(images, 20, 2) * 110 - 10  # some reach beyond the map
        number = torch.randint(0, images, (images, 20, 1))
        found = boxes_and_scores()
        regions = torch.cat([number, corner, corner + torch.rand(images, 20, 2) * 70], -1)
        regions[0, 0, 1:] = 0  # an empty place
        return torch.randn(images, 3, height, width), found.boxes[:images], found.scores[:images], regions

    network = Operators(nn.Identity())
    write(network, inputs(2, 24, 32), tmp_path / 'operators.onnx', 1)
    run = Exported(tmp_path / 'operators.onnx')
    for tensors in (inputs(2, 24, 32), inputs(1, 30, 25)):
        for found, expected in zip(run(*tensors), network(*tensors), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
