"""The best boxes of an image, in graphs of any size."""

from __future__ import annotations

import pytest
import torch
from helpers.exported import boxes_and_scores
from mmcv.ops import batched_nms

from mmgate.deploy.boxes import non_maximum_suppression
from mmgate.errors import ConfigError


@pytest.mark.parametrize('count', [10, 80], ids=['fewer than there are', 'more'])
@pytest.mark.parametrize('agnostic', [False, True], ids=['by class', 'of all classes'])
def test_the_best_boxes_are_mmcvs(count: int, agnostic: bool) -> None:
    found = boxes_and_scores()
    cfg = dict(type='nms', iou_threshold=0.5, class_agnostic=agnostic)
    chosen = non_maximum_suppression(found, cfg, count)
    for image in range(2):
        boxes, scores, labels = (part[image] for part in found)
        there = (scores > 0).nonzero().flatten()
        _, kept = batched_nms(boxes[there], scores[there], labels[there], dict(cfg), class_agnostic=agnostic)
        expected = there[kept][:count]
        number = len(expected)
        for part, whole in zip(chosen, (boxes, scores, labels), strict=True):
            assert torch.equal(part[image, :number], whole[expected])
        assert chosen.scores.shape == (2, count) and (chosen.scores[image, number:] == -1).all()
        assert (chosen.labels[image, number:] == -1).all() and not chosen.boxes[image, number:].any()


def test_another_suppression_is_refused() -> None:
    with pytest.raises(ConfigError, match=r'nms=.*soft_nms.* cannot be exported: ONNX has .*--cfg-options'):
        non_maximum_suppression(boxes_and_scores(), dict(type='soft_nms', iou_threshold=0.5), 10)
