"""The demos' picture of predictions."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from conftest import tool
from mmdet.structures import DetDataSample
from mmengine.structures import InstanceData


def test_masks_are_painted(tmp_path: Path) -> None:
    """On the object and nowhere else."""
    cv2.imwrite(str(tmp_path / 'x.png'), np.full((96, 96, 3), 128, np.uint8))
    found = InstanceData(bboxes=torch.tensor([[8.0, 40, 88, 88]]), labels=torch.tensor([1]), scores=torch.tensor([0.9]))
    sample = DetDataSample(metainfo=dict(img_path=str(tmp_path / 'x.png')), pred_instances=found)
    pictures = []
    for masked in (False, True):
        if masked:
            found.masks = torch.zeros(1, 96, 96, dtype=torch.bool)
            found.masks[:, 50:70, 30:60] = True
        picture = tool('predictions', 'dev').draw_detections(
            [sample], ('a', 'b'), tmp_path / f'{masked}.png', columns=1
        )
        pictures.append(cv2.imread(str(picture)).astype(int))
    rows, columns = np.nonzero(np.abs(pictures[1] - pictures[0]).sum(-1))
    assert np.ptp(columns) / np.ptp(rows) == pytest.approx(30 / 20, rel=0.03)
    assert len(rows) == pytest.approx((np.ptp(rows) + 1) * (np.ptp(columns) + 1), rel=0.01)
