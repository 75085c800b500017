"""Decode and select the boxes of dense heads for a whole batch, always the same number, as a graph needs it.

mmdet returns any number, image by image.

Layout: boxes (B, N, 4) as (x1, y1, x2, y2) in pixels of the input; scores (B, N), -1 where there is no box.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from mmdet.models.dense_heads import AnchorHead, RPNHead
from torch import Tensor

from mmgate.errors import ConfigError

from .operators import nms_keep


class Boxes(NamedTuple):
    """Boxes of a batch ``(B, N, 4)``, their scores ``(B, N)``, and their labels ``(B, N)``, or levels for an RPN."""

    boxes: Tensor
    scores: Tensor
    labels: Tensor


def candidates(
    head: AnchorHead, scores: Sequence[Tensor], deltas: Sequence[Tensor], sizes: Tensor, cfg: Mapping[str, Any]
) -> Boxes:
    """Return the best ``nms_pre`` boxes of each level before non-maximum suppression, like mmdet's head.

    Args:
        head: A RetinaNet's head, or an RPN's, whose labels are levels.
        scores: Logits ``(B, A * C, h, w)`` of each level.
        deltas: Box deltas ``(B, A * 4, h, w)`` of each level.
        sizes: Height and width of the images without padding, ``(B, 2)``.
        cfg: The head's ``test_cfg``.
    """
    proposes = isinstance(head, RPNHead)
    options = dict(dtype=scores[0].dtype, device=scores[0].device)
    priors = head.prior_generator.grid_priors([level.shape[-2:] for level in scores], **options)
    found = []
    for number, (logits, delta, prior) in enumerate(zip(scores, deltas, priors, strict=True)):
        logits = logits.permute(0, 2, 3, 1).reshape(logits.shape[0], -1, head.cls_out_channels)
        score = logits.sigmoid() if head.use_sigmoid_cls else logits.softmax(-1)[..., :-1]
        classes = score.shape[-1]
        score = score.flatten(1)
        score = torch.where(score > cfg.get('score_thr', 0.0), score, -1.0)
        count = cfg.get('nms_pre', -1)
        # Padding by ``count`` makes the number of boxes independent of the level's size.
        if count > 0:
            score, index = F.pad(score, (0, count), value=-1.0).topk(count)
            index = torch.where(score > 0, index, 0)
        else:
            index = torch.arange(score.shape[1], device=score.device).expand_as(score)
        place = index // classes
        delta = delta.permute(0, 2, 3, 1).reshape(delta.shape[0], -1, 4)
        delta = delta.gather(1, place[..., None].expand(-1, -1, 4))
        boxes = decode(head.bbox_coder, prior[place], delta, sizes)
        found.append(Boxes(boxes, score, torch.full_like(index, number) if proposes else index % classes))
    boxes, score, labels = (torch.cat(parts, 1) for parts in zip(*found, strict=True))
    smallest = cfg.get('min_bbox_size', -1)
    if smallest >= 0:
        sides = boxes[..., 2:] - boxes[..., :2]
        score = torch.where((sides > smallest).all(-1), score, -1.0)
    return Boxes(boxes, score, labels)


def decode(coder: Any, priors: Tensor, deltas: Tensor, sizes: Tensor) -> Tensor:
    """Return the boxes ``(B, N, 4)`` of priors and deltas by mmdet's coder, clipped to the image if it says so."""
    boxes = coder.decode(priors.reshape(-1, 4), deltas.reshape(-1, 4)).view(deltas.shape)
    return clip_boxes(boxes, sizes) if coder.clip_border else boxes


def clip_boxes(boxes: Tensor, sizes: Tensor) -> Tensor:
    """Clip boxes ``(B, N, 4)`` at the edges of their images, whose heights and widths are ``sizes`` ``(B, 2)``."""
    return torch.minimum(boxes.clamp(min=0), sizes.flip(-1).repeat(1, 2)[:, None].to(boxes.dtype))


def non_maximum_suppression(found: Boxes, cfg: Mapping[str, Any], count: int) -> Boxes:
    """Apply non-maximum suppression and return the ``count`` best boxes.

    Args:
        found: Boxes, scores and labels.
        cfg: Config of mmdet's ``nms``.
        count: Number of boxes to return; missing ones have the score -1.

    Raises:
        ConfigError: ``cfg`` asks for a suppression for which ONNX has no operator.
    """
    known = {'type', 'iou_threshold', 'class_agnostic', 'split_thr'}
    if cfg.get('type', 'nms') != 'nms' or set(cfg) - known:
        raise ConfigError(
            f"nms={dict(cfg)} cannot be exported: ONNX has the operator of dict(type='nms', iou_threshold=...) alone. "
            'Set that in test_cfg by --cfg-options.'
        )
    boxes, scores, labels = found
    places = labels.to(boxes.dtype) * (boxes.flatten(1).amax(1, keepdim=True) + 1)
    # Boxes of different classes are moved apart, as in mmcv's batched_nms.
    apart = boxes if cfg.get('class_agnostic') else boxes + places[..., None]
    kept = torch.where(nms_keep(apart, scores, cfg['iou_threshold']), scores, -1.0)
    scores, index = F.pad(kept, (0, count), value=-1.0).topk(count)
    # There may be fewer boxes than ``count``.
    index = index.clamp(max=boxes.shape[1] - 1)
    empty = scores <= 0
    boxes = boxes.gather(1, index[..., None].expand(-1, -1, 4)).masked_fill(empty[..., None], 0.0)
    return Boxes(boxes, scores, labels.gather(1, index).masked_fill(empty, -1))
