r"""Non-maximum suppression on batches, of a fixed number of results: ONNX's operator, or a loop of plain ones.

Layout: boxes (B, N, 4) as (x1, y1, x2, y2); scores (B, N), what is not above 0 is no candidate; results (B, K).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmgate.ops.library import operator

from .tracing import repeat, writes_onnx


def nms(boxes: Tensor, scores: Tensor, iou_threshold: float, count: int) -> tuple[Tensor, Tensor]:
    """Return the best boxes of each image of which no better one covers too much, as mmcv's ``nms`` chooses them.

    Args:
        boxes: ``(B, N, 4)``.
        scores: ``(B, N)``; a box whose score is not above 0 is left out and covers nothing.
        iou_threshold: A box whose IoU with a better one is above it goes.
        count: K, how many boxes of an image are wanted.

    Returns:
        Indices ``(B, K)`` into the boxes, the best first, int64, and their scores ``(B, K)``, -1 where there are fewer.
    """
    if scores.shape[1] < count:
        missing = count - scores.shape[1]
        boxes = torch.cat([boxes, boxes.new_zeros(1, missing, 4).expand(boxes.shape[0], -1, -1)], 1)
        scores = torch.cat([scores, scores.new_full((1, missing), -1.0).expand(scores.shape[0], -1)], 1)
    if writes_onnx():
        kept = keep(boxes, scores, iou_threshold)
        best, index = torch.where(kept, scores, -1.0).topk(count)
        return index, best
    return _greedy(boxes, scores, iou_threshold, count)


def class_offsets(boxes: Tensor, labels: Tensor) -> Tensor:
    """Move the boxes ``(B, N, 4)`` of each label ``(B, N)`` to a place of their own, as mmcv's ``batched_nms`` does."""
    return boxes + (labels.to(boxes.dtype) * (boxes.flatten(1).amax(1, keepdim=True) + 1))[..., None]


def _fake_keep(boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    return torch.empty_like(scores, dtype=torch.bool)


@operator('nms_keep', fake=_fake_keep)
def keep(boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """Return which boxes stay, ``(B, N)`` bool; in ONNX a NonMaxSuppression, see :mod:`mmgate.deploy.onnx_file`."""
    index, best = _greedy(boxes, scores, iou_threshold, scores.shape[1])
    return torch.zeros_like(scores, dtype=torch.int64).scatter_add(1, index, (best > 0).long()) > 0


def _greedy(boxes: Tensor, scores: Tensor, iou_threshold: float, count: int) -> tuple[Tensor, Tensor]:
    """Take the best box and remove what it covers, ``count`` times."""
    slots = torch.arange(count, device=scores.device)
    areas = _area(boxes)

    def goes_on(step: Tensor, left: Tensor, index: Tensor, best: Tensor) -> Tensor:
        return (step < count) & (left > 0).any()

    def take(step: Tensor, left: Tensor, index: Tensor, best: Tensor) -> tuple[Tensor, ...]:
        score, at = left.max(1, keepdim=True)  # (B, 1)
        box = boxes.gather(1, at[..., None].expand(-1, -1, 4))  # (B, 1, 4)
        corner1, corner2 = torch.maximum(box[..., :2], boxes[..., :2]), torch.minimum(box[..., 2:], boxes[..., 2:])
        shared = (corner2 - corner1).clamp(min=0).prod(-1)  # (B, N)
        covered = shared / (areas + _area(box) - shared) > iou_threshold
        left = torch.where(covered, -1.0, left).scatter(1, at, -1.0)
        here = (slots == step) & (score > 0)  # (B, K)
        return step + 1, left, torch.where(here, at, index), torch.where(here, score, best)

    start: tuple[Any, ...] = (
        torch.zeros((), dtype=torch.int64, device=scores.device),
        scores.clone(),
        torch.zeros_like(slots)[None].repeat(scores.shape[0], 1),
        scores.new_full((1, count), -1.0).repeat(scores.shape[0], 1),
    )
    return repeat(goes_on, take, start)[2:]


def _area(boxes: Tensor) -> Tensor:
    return (boxes[..., 2] - boxes[..., 0]) * (boxes[..., 3] - boxes[..., 1])
