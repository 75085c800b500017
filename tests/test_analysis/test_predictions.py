"""The picture of predictions."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import cv2
import numpy as np
import torch
from conftest import ROOT
from mmdet.structures import DetDataSample
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
from mmengine.runner import save_checkpoint
from mmengine.structures import InstanceData

from mmgate.analysis.figures import predictions
from mmgate.analysis.figures.predictions import draw_predictions
from mmgate.datasets.shapes import write_shapes


def test_predictions_picture(tmp_path: Path) -> None:
    cfg = Config.fromfile(ROOT / 'configs/plug/deformable_detr/plug-deformable-detr-refine_r18_1xb8-12e_shapes.py')
    write_shapes(tmp_path / 'shapes', num_train=1, num_val=3, size=64)
    cfg.test_dataloader.dataset.data_root = str(tmp_path / 'shapes')
    init_default_scope('mmdet')
    model = MODELS.build(deepcopy(cfg.model))
    model.init_weights()
    save_checkpoint({'state_dict': model.state_dict()}, str(tmp_path / 'x.pth'))
    out = draw_predictions(cfg, str(tmp_path / 'x.pth'), tmp_path / 'new/p.png', images=8, columns=2)
    assert cv2.imread(str(out)).shape == (768, 768, 3)


def test_masks_are_painted(tmp_path: Path) -> None:
    """On the object and nowhere else but for the box and its label."""
    cv2.imwrite(str(tmp_path / 'x.png'), np.full((96, 96, 3), 128, np.uint8))
    found = InstanceData(bboxes=torch.tensor([[8.0, 40, 88, 88]]), labels=torch.tensor([1]), scores=torch.tensor([0.9]))
    sample = DetDataSample(metainfo=dict(img_path=str(tmp_path / 'x.png'), scale_factor=(1.0, 1.0)))
    sample.gt_instances = InstanceData(bboxes=torch.zeros(0, 4))
    tiles = []
    for masked in (False, True):
        if masked:
            mask = torch.zeros(1, 96, 96, dtype=torch.bool)
            mask[:, 50:70, 30:60] = True
            found.masks = mask
        sample.pred_instances = found
        tiles.append(predictions._tile(sample, ('a', 'b'), 0.3).astype(int))
    rows, columns = np.nonzero(np.abs(tiles[1] - tiles[0]).sum(-1))
    scale = predictions._SIDE // 96
    assert (rows.min(), rows.max() + 1) == (50 * scale, 70 * scale)
    assert (columns.min(), columns.max() + 1) == (30 * scale, 60 * scale)
