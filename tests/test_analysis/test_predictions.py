"""The picture of predictions."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from conftest import ROOT
from mmdet.structures import DetDataSample
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
from mmengine.runner import save_checkpoint
from mmengine.structures import InstanceData

from mmgate.analysis.figures.predictions import draw_detections, draw_predictions
from mmgate.datasets.shapes import write_shapes


def test_predictions_picture(tmp_path: Path) -> None:
    cfg = Config.fromfile(ROOT / 'configs/plug/deformable_detr/plug-deformable-detr-refine_r18_1xb8-12e_shapes.py')
    write_shapes(tmp_path / 'shapes', num_train=1, num_val=3, size=64)
    cfg.test_dataloader.dataset.data_root = str(tmp_path / 'shapes')
    cfg.test_evaluator.ann_file = str(tmp_path / 'shapes/annotations/instances_val.json')
    init_default_scope('mmdet')
    model = MODELS.build(deepcopy(cfg.model))
    model.init_weights()
    save_checkpoint({'state_dict': model.state_dict()}, str(tmp_path / 'x.pth'))
    out = draw_predictions(cfg, str(tmp_path / 'x.pth'), tmp_path / 'new/p.png', images=8, columns=2)
    assert len(np.unique(cv2.imread(str(out)))) > 50


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
        picture = draw_detections([sample], ('a', 'b'), tmp_path / f'{masked}.png', columns=1)
        pictures.append(cv2.imread(str(picture)).astype(int))
    rows, columns = np.nonzero(np.abs(pictures[1] - pictures[0]).sum(-1))
    assert np.ptp(columns) / np.ptp(rows) == pytest.approx(30 / 20, rel=0.03)
    assert len(rows) == pytest.approx((np.ptp(rows) + 1) * (np.ptp(columns) + 1), rel=0.01)
