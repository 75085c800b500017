"""Let mmdet's DETR-like heads match the predictions of all layers and images of a training step at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from mmdet.models.dense_heads import DETRHead, DINOHead
from mmdet.models.losses import (
    CIoULoss,
    CrossEntropyLoss,
    DIoULoss,
    FocalLoss,
    GIoULoss,
    IoULoss,
    L1Loss,
    SmoothL1Loss,
)
from mmdet.models.task_modules.assigners import (
    BBoxL1Cost,
    ClassificationCost,
    FocalLossCost,
    HungarianAssigner,
    IoUCost,
)
from mmdet.structures.bbox import bbox_cxcywh_to_xyxy, bbox_xyxy_to_cxcywh
from mmdet.utils import reduce_mean
from mmengine.structures import InstanceData
from torch import Tensor

from mmgate.speed.derived import host_method

from .pairs import AsynchronousConstants, assigns_by, image_name, match_pairs, padded, to_device

# mmdet's costs that read no values, so that torch.vmap computes them for all images.
COSTS = (BBoxL1Cost, ClassificationCost, FocalLossCost, IoUCost)
# Losses that are sums over predictions, divided by a number.
SUMS = (CrossEntropyLoss, FocalLoss, L1Loss, SmoothL1Loss, IoULoss, GIoULoss, DIoULoss, CIoULoss)
# The parts of a head that all losses as one batch replace.
TARGETS = ('loss_by_feat_single', 'get_targets', '_get_targets_single')
DENOISING = ('loss_dn', '_loss_dn_single', 'get_dn_targets', '_get_dn_targets_single')

NO_PAIRS = np.empty((2, 0), np.int64)


class Layer(NamedTuple):
    """Predictions of one decoder layer for a batch, with the batch's annotated objects.

    Attributes:
        scores: Logits ``(B, Q, K)``.
        boxes: Boxes ``(B, Q, 4)`` as (cx, cy, w, h), 0 to 1.
        objects: Objects of each image: ``bboxes`` ``(G, 4)``, corners in pixels, and ``labels`` ``(G,)``.
        metas: Meta information of each image, with ``img_shape``.
        pairs: Pairs of each image ``(2, N)`` if they are known, as denoising queries' are; None to match them.
    """

    scores: Tensor
    boxes: Tensor
    objects: list[InstanceData]
    metas: list[dict[str, Any]]
    pairs: list[np.ndarray] | None = None


class Placeholder(NamedTuple):
    """Placeholder for one loss of a decoder layer, until all layers are matched and the loss is known.

    Attributes:
        layer: Index of the layer.
        part: Index of the loss: 0 for classes, 1 for boxes, 2 for overlaps.
    """

    layer: int
    part: int


class MatchedOnceHead(DETRHead):
    """Mixin for a DETR-like head that collects all decoder layers, matches them at once and then computes losses.

    The head's own ``loss_by_feat`` runs with placeholders for the losses of its layers. Then all layers are matched,
    and the losses replace the placeholders.
    """

    assigner: Any
    _layers: list[Layer] | None = None

    def loss_by_feat(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Compute the head's losses, with all decoder layers matched at once; the arguments are those of mmdet."""
        # A subclass may compute with what are placeholders here.
        if type(self).loss_by_feat_single is not MatchedOnceHead.loss_by_feat_single or not is_plain(self):
            return super().loss_by_feat(*args, **kwargs)
        layers: list[Layer] = []
        self._layers = layers
        try:
            with AsynchronousConstants():
                losses = super().loss_by_feat(*args, **kwargs)
                found = self._losses(layers)
        finally:
            self._layers = None
        return {
            name: found[value.layer][value.part] if isinstance(value, Placeholder) else value
            for name, value in losses.items()
        }

    def loss_by_feat_single(
        self, cls_scores: Tensor, bbox_preds: Tensor, batch_gt_instances: list[Any], batch_img_metas: list[Any]
    ) -> Sequence[Any]:
        """Return a decoder layer's losses of classes, boxes and IoU, or placeholders until all layers are matched."""
        given = (cls_scores, bbox_preds, batch_gt_instances, batch_img_metas)
        return super().loss_by_feat_single(*given) if self._layers is None else self._placeholders(Layer(*given))

    def loss_dn(
        self,
        all_layers_denoising_cls_scores: Tensor,
        all_layers_denoising_bbox_preds: Tensor,
        batch_gt_instances: list[Any],
        batch_img_metas: list[Any],
        dn_meta: dict[str, int],
    ) -> Any:
        """Return all layers' losses of denoising queries (DINO), or placeholders until all layers are matched."""
        given = (batch_gt_instances, batch_img_metas)
        predicted = (all_layers_denoising_cls_scores, all_layers_denoising_bbox_preds)
        if self._layers is None or not is_plain(self, DINOHead, DENOISING):
            return super().loss_dn(*predicted, *given, dn_meta)
        pairs = _denoising_pairs(batch_gt_instances, **dn_meta)
        found = [self._placeholders(Layer(*of_layer, *given, pairs)) for of_layer in zip(*predicted, strict=True)]
        return tuple(zip(*found, strict=True))

    def _placeholders(self, layer: Layer) -> tuple[Placeholder, ...]:
        assert self._layers is not None
        self._layers.append(layer)
        return tuple(Placeholder(len(self._layers) - 1, part) for part in range(3))

    def _losses(self, layers: Sequence[Layer]) -> list[tuple[Tensor, ...]]:
        """Match and compute the losses of classes, boxes and IoU of all layers as one batch."""
        if not layers:
            return []
        batch = Batch(layers)
        device = batch.boxes.device
        matched = match(self.assigner, batch)
        rows, columns = to_device(np.concatenate([own for of_layer in matched for own in of_layer], 1), device)
        counts = [[own.shape[1] for own in of_layer] for of_layer in matched]
        layer_of_pair = np.repeat(np.arange(len(layers)), [sum(of_layer) for of_layer in counts])
        sizes = to_device(np.repeat(np.tile(batch.sizes, (len(layers), 1)), np.ravel(counts), 0), device)  # (N, 4)
        sizes = sizes.to(batch.boxes.dtype)
        weights, positives = self._average_factors(batch, [sum(of_layer) for of_layer in counts])

        labels = torch.full(batch.scores.shape[:2], self.num_classes, device=device).flatten()
        labels[rows] = batch.labels.index_select(0, columns)
        of_scores = self.loss_cls(batch.scores.flatten(0, 1), labels, reduction_override='none')
        of_scores = of_scores.reshape(*batch.scores.shape[:2], -1).sum((0, 2))  # (S,)
        losses_cls = _sums(of_scores, batch.layer_of_query, len(layers)) / weights

        # mmdet gives unmatched boxes the weight 0, and waits for the device to see if any weight is not 0.
        boxes = batch.boxes.flatten(0, 1).index_select(0, rows)
        corners = bbox_cxcywh_to_xyxy(boxes) * sizes
        object_boxes = bbox_xyxy_to_cxcywh(batch.object_boxes.index_select(0, columns) / sizes)
        object_corners = bbox_cxcywh_to_xyxy(object_boxes) * sizes
        if len(rows):
            of_boxes = self.loss_bbox(boxes, object_boxes, reduction_override='none').sum(1)
            of_overlaps = self.loss_iou(corners, object_corners, reduction_override='none')
        else:  # mmdet's loss of no boxes is one number
            of_boxes = of_overlaps = boxes.sum(1)
        losses = _sums(torch.stack((of_boxes, of_overlaps)), layer_of_pair, len(layers)) / positives  # (2, L)
        return list(zip(losses_cls.unbind(), *(part.unbind() for part in losses.unbind()), strict=True))

    def _average_factors(self, batch: Batch, positives: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the divisors ``(L,)`` of each layer's losses of classes and of boxes, means over processes."""
        # As in mmdet, unmatched predictions count by the weight of the background.
        background = [
            found if layer.pairs is not None else layer.boxes.shape[0] * layer.boxes.shape[1] - found
            for layer, found in zip(batch.layers, positives, strict=True)
        ]
        weights = [p * 1.0 + n * self.bg_cls_weight for p, n in zip(positives, background, strict=True)]
        numbers = to_device(torch.tensor([weights, [float(count) for count in positives]]), batch.boxes.device)
        means = reduce_mean(numbers)
        own = means if self.sync_cls_avg_factor else numbers
        return own[0].clamp(min=1), means[1].clamp(min=1)


class Batch:
    """Layers of B images as one batch: the queries of all L layers, S together, follow each other in each image.

    Objects of all images follow each other, too, and those of each list of objects that a layer has.

    Attributes:
        layers: The layers.
        scores: Logits ``(B, S, K)``.
        boxes: Boxes ``(B, S, 4)`` as (cx, cy, w, h), 0 to 1.
        starts: The first query of each layer among the S, and the end, ``(L + 1,)``.
        layer_of_query: The layer of each query, ``(S,)``.
        sizes: The size of each image, as (width, height, width, height), ``(B, 4)``.
        labels: Labels of all objects, ``(G,)``.
        object_boxes: Boxes of all objects, corners in pixels, ``(G, 4)``.
        first_objects: The first object of each image, and the end, ``(B + 1,)``, as each layer has them.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.layers = layers
        self.scores = torch.cat([layer.scores for layer in layers], 1)
        self.boxes = torch.cat([layer.boxes for layer in layers], 1)
        queries = [layer.boxes.shape[1] for layer in layers]
        self.starts = np.cumsum([0, *queries])
        self.layer_of_query = np.repeat(np.arange(len(layers)), queries)
        shapes = [meta['img_shape'] for meta in layers[0].metas]
        self.sizes = np.array([(width, height, width, height) for height, width in shapes], np.float64)
        # Most often all layers share one list of objects.
        lists = list({id(layer.objects): layer.objects for layer in layers}.values())
        every = [objects for listed in lists for objects in listed]
        self.labels = torch.cat([objects.labels for objects in every])
        self.object_boxes = torch.cat([objects.bboxes for objects in every])
        firsts = np.cumsum([0, *map(len, every)])
        place_of = {id(listed): place * len(shapes) for place, listed in enumerate(lists)}
        places = [place_of[id(layer.objects)] for layer in layers]
        self.first_objects = [firsts[place : place + len(shapes) + 1] for place in places]


def match(assigner: HungarianAssigner, batch: Batch) -> list[list[np.ndarray]]:
    """Match the predictions of all layers and images to their objects with one GPU synchronisation.

    Args:
        assigner: Its costs are taken.
        batch: Layers; the pairs of some may be known.

    Returns:
        For each layer and image the matched predictions among the ``B * S`` of the batch, ascending, and their objects,
        ``(2, N)``.

    Raises:
        ConfigError: A cost is NaN or infinite; the message names the layer, the image and the cost.
    """
    layers = batch.layers
    found = [layer.pairs or [NO_PAIRS] * len(layer.objects) for layer in layers]
    # Layers that have the same objects are matched together.
    groups: dict[int, list[int]] = {}
    for index, layer in enumerate(layers):
        if layer.pairs is None and any(map(len, layer.objects)):
            groups.setdefault(id(layer.objects), []).append(index)
    costs = [costs_of(assigner, batch, indices) for indices in groups.values()]  # (B, C, Q, G) each
    totals = [cost.sum(1) for cost in costs]
    on_cpu = torch.cat([total.flatten() for total in totals]).cpu() if totals else torch.empty(0)
    parts = on_cpu.split([total.numel() for total in totals]) if totals else ()
    for indices, cost, total, numbers in zip(groups.values(), costs, totals, parts, strict=True):
        queries = [layers[index].boxes.shape[1] for index in indices]
        of_layers = zip(indices, numbers.view(total.shape).split(queries, 1), cost.split(queries, 2), strict=True)
        for index, own, own_costs in of_layers:
            layer = layers[index]
            for image, count in enumerate(map(len, layer.objects)):
                place = f'layer {index + 1} of {len(layers)}, {image_name(layer.metas[image])}'
                pairs = match_pairs(assigner, own[image, :, :count], own_costs[image, :, :, :count], place)
                found[index][image] = pairs
    shifts = [
        [[[image * batch.starts[-1] + start], [first]] for image, first in enumerate(firsts[:-1])]
        for start, firsts in zip(batch.starts[:-1], batch.first_objects, strict=True)
    ]
    return [
        [own + np.array(shift) for own, shift in zip(*of_layer, strict=True)]
        for of_layer in zip(found, shifts, strict=True)
    ]


@torch.no_grad()
def costs_of(assigner: HungarianAssigner, batch: Batch, indices: Sequence[int]) -> Tensor:
    """Compute the C costs ``(B, C, Q, G)`` of layers that have the same objects.

    Images with fewer objects than G have any cost there.
    """
    device = batch.boxes.device
    chosen = to_device(np.flatnonzero(np.isin(batch.layer_of_query, indices)), device)
    boxes = batch.boxes.index_select(1, chosen).float()
    sizes = to_device(batch.sizes, device).to(boxes.dtype)[:, None]  # (B, 1, 4)
    places = to_device(padded(batch.first_objects[indices[0]]), device)  # (B, G)

    def of_image(scores: Tensor, boxes: Tensor, labels: Tensor, object_boxes: Tensor, size: Tensor) -> Tensor:
        predictions = InstanceData(scores=scores, bboxes=bbox_cxcywh_to_xyxy(boxes) * size)
        objects = InstanceData(labels=labels, bboxes=object_boxes)
        of_costs = [
            _distances(cost, boxes, bbox_xyxy_to_cxcywh(object_boxes / size))
            if isinstance(cost, BBoxL1Cost)
            else cost(predictions, objects)
            for cost in assigner.match_costs
        ]
        return torch.stack(of_costs)

    scores = batch.scores.index_select(1, chosen).float()
    object_boxes = batch.object_boxes[places].to(boxes.dtype)
    with AsynchronousConstants():
        return torch.vmap(of_image)(scores, boxes, batch.labels[places], object_boxes, sizes)


def _distances(cost: BBoxL1Cost, boxes: Tensor, object_boxes: Tensor) -> Tensor:
    """Compute the L1 costs ``(Q, G)`` of boxes ``(Q, 4)`` and ``(G, 4)`` as (cx, cy, w, h), 0 to 1.

    For every pair ``torch.cdist``, which mmdet calls, starts a block of 256 threads on a GPU.
    """
    if cost.box_format == 'xyxy':
        boxes = bbox_cxcywh_to_xyxy(boxes)
        object_boxes = bbox_cxcywh_to_xyxy(object_boxes)
    return (boxes[:, None] - object_boxes).abs().sum(-1) * cost.weight


def _sums(values: Tensor, layer_of: np.ndarray, layers: int) -> Tensor:
    """Sum values ``(..., N)`` of each layer, ``(..., L)``."""
    of_layers = to_device(layer_of == np.arange(layers)[:, None], values.device)  # (L, N)
    return torch.where(of_layers, values[..., None, :], 0.0).sum(-1)


def _denoising_pairs(
    batch_objects: Sequence[InstanceData], num_denoising_queries: int, num_denoising_groups: int
) -> list[np.ndarray]:
    """Return the pairs of denoising queries and the objects that they were made of, for each image ``(2, N)``.

    Each of DINO's groups has as many queries for positives as for negatives, as many as the image with most objects.
    """
    width = num_denoising_queries // num_denoising_groups
    found = []
    for objects in batch_objects:
        own = np.arange(len(objects))
        rows = np.arange(num_denoising_groups)[:, None] * width + own
        found.append(np.stack((rows.ravel(), np.tile(own, num_denoising_groups))))
    return found


def is_plain(head: Any, base: type[DETRHead] = DETRHead, own: Sequence[str] = TARGETS) -> bool:
    """Return True if a head computes its targets and losses as mmdet's DETRHead (or another, ``base``) does."""
    losses = (head.loss_cls, head.loss_bbox, head.loss_iou)
    return (
        all(type(loss) in SUMS and loss.reduction == 'mean' for loss in losses)
        and assigns_by(head, COSTS)
        and not any(getattr(cost, 'binary_input', False) for cost in head.assigner.match_costs)
        and all(host_method(MatchedOnceHead, head, name) is getattr(base, name) for name in own)
        # Subclasses of others may compute with the losses, which are known later.
        and host_method(MatchedOnceHead, head, 'loss_by_feat').__module__.startswith('mmdet.')
    )
