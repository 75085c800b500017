"""Non-maximum suppression, hard and soft, in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from .peer import torchvision_ops

PAIRS = 1 << 18  # pairs compared at a time on a CPU: what its caches hold
PAIRS_OF_GPU = 1 << 24  # about 50 bytes each; few and large steps, as each waits for the GPU


def nms(boxes: Tensor, scores: Tensor, iou_threshold: float, offset: int = 0) -> Tensor:
    """Return the indices of the boxes that no kept box of a higher score overlaps by more than the threshold.

    Boxes are compared with the best boxes of a block at a time, so that memory grows with N and not with its square.

    Args:
        boxes: ``(N, 4)`` as (x1, y1, x2, y2), floating point.
        scores: ``(N,)``.
        iou_threshold: The intersection over union that suppresses is larger than this.
        offset: 1 if a box from 3 to 3 is one pixel wide, else 0.

    Returns:
        Indices ``(K,)``, by falling score.
    """
    boxes = boxes.to(torch.promote_types(boxes.dtype, torch.float32))
    if (peer := torchvision_ops(boxes)) is not None:
        # Only differences of corners count: far corners that are moved by the offset give the same sides.
        return peer.nms(boxes + boxes.new_tensor([0, 0, offset, offset]), scores.to(boxes.dtype), iou_threshold)
    pairs = PAIRS if boxes.device.type == 'cpu' else PAIRS_OF_GPU
    left = scores.argsort(descending=True)  # of equal scores in torch's order, as in mmcv
    kept = [left[:0]]
    while len(left):
        block = min(1024, max(32, pairs // len(left)))
        best = left[:block]
        best = best[_greedy(_overlap(boxes[best], boxes[best], offset) > iou_threshold)]
        kept.append(best)
        left = left[block:]
        if len(left):
            left = left[~(_overlap(boxes[best], boxes[left], offset) > iou_threshold).any(0)]
    return torch.cat(kept)


def _greedy(over: Tensor) -> Tensor:
    """Return which of n boxes are kept, ``(n,)``; ``over[i, j]`` says that box i suppresses box j > i if it is kept.

    Every round decides at least one box more for good, by induction from the first, and most rounds decide nearly all.
    """
    over = over.triu(1)
    kept = ~over.any(0)  # whom nobody can suppress
    while True:
        following = ~(over & kept[:, None]).any(0)
        if torch.equal(following, kept):
            return kept
        kept = following


def _overlap(boxes: Tensor, others: Tensor, offset: int) -> Tensor:
    """Return the intersections over unions ``(N, M)``, by the same operations in the same order as mmcv."""
    width = torch.minimum(boxes[:, None, 2], others[:, 2]) - torch.maximum(boxes[:, None, 0], others[:, 0]) + offset
    height = torch.minimum(boxes[:, None, 3], others[:, 3]) - torch.maximum(boxes[:, None, 1], others[:, 1]) + offset
    both = width.clamp_(min=0) * height.clamp_(min=0)
    return both / (_area(boxes, offset)[:, None] + _area(others, offset) - both)


def _area(boxes: Tensor, offset: int) -> Tensor:
    return (boxes[:, 2] - boxes[:, 0] + offset) * (boxes[:, 3] - boxes[:, 1] + offset)


def soft_nms(
    boxes: Tensor,
    scores: Tensor,
    iou_threshold: float,
    sigma: float,
    min_score: float,
    method: int,
    offset: int = 0,
) -> tuple[Tensor, Tensor]:
    """Lower the scores of boxes by their overlap with better ones, and drop what falls below ``min_score``.

    Args:
        boxes: ``(N, 4)`` as (x1, y1, x2, y2), float32.
        scores: ``(N,)``.
        iou_threshold: Methods 0 and 1 change the scores of boxes that overlap by this or more.
        sigma: Of method 2.
        min_score: The lowest score that is kept.
        method: 0 drops the box, 1 multiplies its score by 1 - IoU, 2 by exp(-IoU^2 / sigma).
        offset: 1 if a box from 3 to 3 is one pixel wide, else 0.

    Returns:
        The kept boxes and their scores ``(K, 5)``, best first, and their indices ``(K,)``.

    Source: Soft-NMS (arXiv 1704.04503).
    """
    left = torch.cat([boxes, scores[:, None].to(boxes.dtype)], 1)
    index = torch.arange(len(boxes), device=boxes.device)
    kept = []
    indices = []
    while len(left):
        best = left[:, 4].argmax()
        kept.append(left[best].clone())
        indices.append(index[best].clone())
        # mmcv swaps in place, which decides between equal scores: the first box takes the place of the best.
        left[best] = left[0]
        index[best] = index[0]
        left = left[1:]
        index = index[1:]
        overlap = _overlap(kept[-1][None], left, offset)[0].nan_to_num(0)  # of two empty boxes it is 0 / 0
        if method == 2:
            left[:, 4] *= torch.exp(-(overlap * overlap) / sigma)
        else:
            left[:, 4] *= torch.where(overlap >= iou_threshold, 1 - overlap if method else 0.0, 1.0)
        order = _filled_from_the_end(left[:, 4] < min_score)
        left = left[order]
        index = index[order]
    if not kept:
        return left, index
    return torch.stack(kept), torch.stack(indices)


def _filled_from_the_end(dropped: Tensor) -> Tensor:
    """Return the order in which boxes remain if the last one takes the place of each that is dropped, as in mmcv."""
    remaining = int((~dropped).sum())
    order = torch.arange(remaining, device=dropped.device)
    order[dropped[:remaining]] = remaining + (~dropped[remaining:]).nonzero()[:, 0].flip(0)
    return order
