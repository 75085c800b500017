"""Let mmdet's DETR-like heads match the predictions of all layers and images of a training step at once."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from mmdet.models.dense_heads import DETRHead, DINOHead, Mask2FormerHead
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
    AssignResult,
    BBoxL1Cost,
    ClassificationCost,
    FocalLossCost,
    IoUCost,
)
from mmdet.models.task_modules.assigners import HungarianAssigner as MMDetHungarianAssigner
from mmdet.structures.bbox import bbox_cxcywh_to_xyxy, bbox_xyxy_to_cxcywh
from mmdet.utils import reduce_mean
from mmengine.structures import InstanceData
from torch import Tensor, nn
from torch.nn import functional

from mmgate.speed.derived import derived_class, host_method

from .assigner import AsynchronousConstants, HungarianAssigner, as_result, cost_of, image_name, named_costs
from .masks import MatchedOnceMaskHead
from .pairs import Problem, match_all, to_device


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

    See :func:`match_once`.

    The head's own ``loss_by_feat`` runs with placeholders for the losses of its layers. Then all layers are matched,
    and the losses replace the placeholders.
    """

    assigner: Any
    _layers: list[Layer] | None = None

    def loss_by_feat(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Compute the head's losses, with all decoder layers matched at once; the arguments are those of mmdet."""
        if type(self).loss_by_feat_single is not MatchedOnceHead.loss_by_feat_single:
            return super().loss_by_feat(*args, **kwargs)  # a subclass may compute with what are placeholders here
        layers: list[Layer] = []
        self._layers = layers
        try:
            with AsynchronousConstants():
                losses = super().loss_by_feat(*args, **kwargs)
        finally:
            self._layers = None
        found = self._losses(layers)
        for name, value in losses.items():
            if isinstance(value, Placeholder):
                losses[name] = found[value.layer][value.part]
        return losses

    def loss_by_feat_single(
        self, cls_scores: Tensor, bbox_preds: Tensor, batch_gt_instances: list[Any], batch_img_metas: list[Any]
    ) -> Sequence[Any]:
        """Return a decoder layer's losses of classes, boxes and IoU, or placeholders until all layers are matched."""
        layer = Layer(cls_scores, bbox_preds, batch_gt_instances, batch_img_metas)
        if self._layers is None:
            return self._losses([layer])[0]
        self._layers.append(layer)
        return tuple(Placeholder(len(self._layers) - 1, part) for part in range(3))

    def loss_dn(
        self,
        all_layers_denoising_cls_scores: Tensor,
        all_layers_denoising_bbox_preds: Tensor,
        batch_gt_instances: list[Any],
        batch_img_metas: list[Any],
        dn_meta: dict[str, int],
    ) -> Any:
        """Return all layers' losses of denoising queries (DINO), or placeholders until all layers are matched."""
        if self._layers is None or not _is_plain(self) or not _is_plain(self, DINOHead, DENOISING):
            return super().loss_dn(
                all_layers_denoising_cls_scores,
                all_layers_denoising_bbox_preds,
                batch_gt_instances=batch_gt_instances,
                batch_img_metas=batch_img_metas,
                dn_meta=dn_meta,
            )
        pairs = _denoising_pairs(batch_gt_instances, **dn_meta)
        found = []
        for scores, boxes in zip(all_layers_denoising_cls_scores, all_layers_denoising_bbox_preds, strict=True):
            found.append([Placeholder(len(self._layers), part) for part in range(3)])
            self._layers.append(Layer(scores, boxes, batch_gt_instances, batch_img_metas, pairs))
        return tuple(zip(*found, strict=True))

    def _losses(self, layers: Sequence[Layer]) -> Sequence[Sequence[Tensor]]:
        """Match all decoder layers at once, and return each layer's losses of classes, boxes and IoU."""
        if not layers:
            return []
        with AsynchronousConstants():
            if _is_plain(self) and len({layer.scores.shape[-1] for layer in layers}) == 1:
                return self._plain_losses(Batch(layers))
            moved = _moved(match(self.assigner, Batch(layers)), layers[0].boxes.device)
            return [self._host_losses(layer, found) for layer, found in zip(layers, moved, strict=True)]

    def _host_losses(self, layer: Layer, matched: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Compute a layer's losses by mmdet's code, with an assigner that returns the pairs already known."""
        known = iter(matched)

        def assign(pred_instances: InstanceData, gt_instances: InstanceData, **_: object) -> AssignResult:
            return as_result(next(known), len(pred_instances), gt_instances.labels)

        assigner = self.assigner
        self.assigner = SimpleNamespace(assign=assign)
        try:
            return super().loss_by_feat_single(*layer[:4])
        finally:
            self.assigner = assigner

    def _plain_losses(self, batch: Batch) -> list[tuple[Tensor, ...]]:
        """Match and compute all layers' losses as one batch, for heads with DETRHead's targets and losses."""
        scores = torch.cat([layer.scores for layer in batch.layers], 1)  # (B, S, K)
        boxes = torch.cat([layer.boxes for layer in batch.layers], 1)  # (B, S, 4)
        pairs = batch.flat(match(self.assigner, batch, scores, boxes))
        rows, columns = batch.to_device(torch.from_numpy(pairs.indices))
        sizes = batch.to_device(torch.from_numpy(pairs.sizes).to(boxes.dtype))  # (N, 4)
        weights, counts = self._average_factors(batch, pairs.counts)

        labels = torch.full((scores.shape[0] * scores.shape[1],), self.num_classes, device=scores.device)
        labels[rows] = batch.labels.index_select(0, columns)
        of_scores = self.loss_cls(scores.flatten(0, 1), labels, reduction_override='none')
        of_scores = of_scores.reshape(*scores.shape[:2], -1).sum((0, 2))  # (S,)
        of_layers = batch.to_device(torch.from_numpy(batch.layer_of_query == batch.numbers))  # (L, S)
        losses_cls = torch.where(of_layers, of_scores, 0.0).sum(1) / weights

        # mmdet gives unmatched boxes the weight 0, and waits for the device to see if any weight is not 0.
        boxes = boxes.flatten(0, 1).index_select(0, rows)
        corners = bbox_cxcywh_to_xyxy(boxes) * sizes
        object_boxes = bbox_xyxy_to_cxcywh(batch.boxes.index_select(0, columns) / sizes)
        object_corners = bbox_cxcywh_to_xyxy(object_boxes) * sizes
        if len(rows):
            of_boxes = self.loss_bbox(boxes, object_boxes, reduction_override='none').sum(1)
            of_overlaps = self.loss_iou(corners, object_corners, reduction_override='none')
        else:  # mmdet's loss of no boxes is one number
            of_boxes = of_overlaps = boxes.sum(1)
        of_layers = batch.to_device(torch.from_numpy(pairs.layers == batch.numbers))  # (L, N)
        of_pairs = torch.stack((of_boxes, of_overlaps))[:, None]  # (2, 1, N)
        losses = torch.where(of_layers, of_pairs, 0.0).sum(2) / counts  # (2, L)
        return list(zip(losses_cls.unbind(), *(part.unbind() for part in losses.unbind()), strict=True))

    def _average_factors(self, batch: Batch, positives: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the divisors ``(L,)`` of each layer's losses of classes and of boxes, means over processes."""
        # As in mmdet, unmatched predictions count by the weight of the background.
        background = [
            found if layer.pairs is not None else layer.boxes.shape[0] * layer.boxes.shape[1] - found
            for layer, found in zip(batch.layers, positives, strict=True)
        ]
        weights = [p * 1.0 + n * self.bg_cls_weight for p, n in zip(positives, background, strict=True)]
        numbers = batch.to_device(torch.tensor([weights, [float(count) for count in positives]]))
        means = reduce_mean(numbers)
        own = means if self.sync_cls_avg_factor else numbers
        return own[0].clamp(min=1), means[1].clamp(min=1)


class MatchedPairs(NamedTuple):
    """Matched pairs of all layers and images, on the CPU.

    Attributes:
        indices: Their predictions among the ``B * S`` of the batch, and their objects, ``(2, N)``.
        layers: The layer of each, ``(N,)``.
        sizes: The size of the image of each, as (width, height, width, height), ``(N, 4)``.
        counts: The number of pairs of each layer, ``(L,)``.
    """

    indices: np.ndarray
    layers: np.ndarray
    sizes: np.ndarray
    counts: list[int]


class Batch:
    """Layers of B images as one batch: the queries of all L layers, S together, follow each other in each image.

    Objects of all images follow each other, too, and those of each list of objects that a layer has.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.layers = layers
        self.device = layers[0].boxes.device
        queries = [layer.boxes.shape[1] for layer in layers]
        self.starts = np.cumsum([0, *queries])
        self.numbers = np.arange(len(layers))[:, None]
        self.layer_of_query = np.repeat(self.numbers[:, 0], queries)
        # Most often all layers share one list of objects.
        self.lists = list({id(layer.objects): layer.objects for layer in layers}.values())
        counts = [len(objects) for listed in self.lists for objects in listed]
        self.first_objects = np.cumsum([0, *counts])
        shapes = [meta['img_shape'] for meta in layers[0].metas]
        self.sizes = np.array([(width, height, width, height) for height, width in shapes], np.float64)  # (B, 4)

    def to_device(self, numbers: Tensor) -> Tensor:
        """Copy a CPU tensor to the device of the layers without waiting for it."""
        return to_device(numbers, self.device)

    @functools.cached_property
    def labels(self) -> Tensor:
        """Labels of all objects, ``(G,)``."""
        return torch.cat([objects.labels for listed in self.lists for objects in listed])

    @functools.cached_property
    def boxes(self) -> Tensor:
        """Boxes of all objects, corners in pixels, ``(G, 4)``."""
        return torch.cat([objects.bboxes for listed in self.lists for objects in listed])

    def objects_of(self, layer: Layer) -> np.ndarray:
        """Return the index of the first object of each image, as this layer has them, and of the end, ``(B + 1,)``."""
        images = len(layer.objects)
        place = next(place for place, listed in enumerate(self.lists) if listed is layer.objects) * images
        return self.first_objects[place : place + images + 1]

    def flat(self, matched: Sequence[Sequence[np.ndarray]]) -> MatchedPairs:
        """Join the pairs of each layer and image."""
        parts, layer_of, image_of, counts = [], [], [], []
        for index, (layer, found) in enumerate(zip(self.layers, matched, strict=True)):
            firsts = self.objects_of(layer)
            for image, own in enumerate(found):
                shift = [[image * self.starts[-1] + self.starts[index]], [firsts[image]]]
                parts.append(own + np.array(shift))
                layer_of.append(np.full(own.shape[1], index))
                image_of.append(np.full(own.shape[1], image))
            counts.append(sum(own.shape[1] for own in found))
        sizes = self.sizes[np.concatenate(image_of)]
        return MatchedPairs(np.concatenate(parts, 1), np.concatenate(layer_of), sizes, counts)


def match(
    assigner: MMDetHungarianAssigner, batch: Batch, scores: Tensor | None = None, boxes: Tensor | None = None
) -> list[list[np.ndarray]]:
    """Match the predictions of all layers and images to their objects with one GPU synchronisation.

    Args:
        assigner: Its costs are taken.
        batch: Layers; the pairs of some may be known.
        scores: Logits of all layers ``(B, S, K)``, if they are at hand as one tensor.
        boxes: Boxes of all layers ``(B, S, 4)``, too.

    Returns:
        For each layer and image the matched predictions, ascending, and their objects, ``(2, N)``.

    Raises:
        ConfigError: A cost is NaN or infinite; the message names the layer, the image and the cost.
    """
    layers = batch.layers
    matched = [layer.pairs or [np.empty((2, 0), np.int64)] * len(layer.objects) for layer in layers]
    # Layers that have the same objects are matched together: in one tensor (B, Q, G).
    groups: dict[int, list[int]] = {}
    for index, layer in enumerate(layers):
        if layer.pairs is None and any(len(objects) for objects in layer.objects):
            groups.setdefault(id(layer.objects), []).append(index)
    if not groups:
        return matched
    costs = [costs_of(assigner, batch, indices, scores, boxes) for indices in groups.values()]
    on_cpu = (torch.cat([cost.flatten() for cost in costs]) if len(costs) > 1 else costs[0].flatten()).cpu()
    places, problems = [], []
    for indices, cost, numbers in zip(groups.values(), costs, on_cpu.split([x.numel() for x in costs]), strict=True):
        queries = [layers[index].boxes.shape[1] for index in indices]
        for index, of_layer in zip(indices, numbers.view(cost.shape).split(queries, 1), strict=True):
            for image, objects in enumerate(layers[index].objects):
                layer = layers[index]
                place = f'layer {index + 1} of {len(layers)}, {image_name(layer.metas[image])}'
                parts = functools.partial(_parts, assigner, layer, image)
                places.append((index, image))
                problems.append(Problem(of_layer[image, :, : len(objects)], place, parts))
    for (index, image), found in zip(places, match_all(problems), strict=True):
        matched[index][image] = found
    return matched


def _parts(assigner: MMDetHungarianAssigner, layer: Layer, image: int) -> list[tuple[str, Tensor]]:
    """Compute each cost of a layer's predictions for one image, with its name."""
    objects, meta, boxes = layer.objects[image], layer.metas[image], layer.boxes[image].detach()
    height, width = meta['img_shape']
    corners = bbox_cxcywh_to_xyxy(boxes) * boxes.new_tensor([[width, height, width, height]])
    return named_costs(assigner, InstanceData(scores=layer.scores[image].detach(), bboxes=corners), objects, meta)


@torch.no_grad()
def costs_of(
    assigner: MMDetHungarianAssigner,
    batch: Batch,
    indices: Sequence[int],
    scores: Tensor | None = None,
    boxes: Tensor | None = None,
) -> Tensor:
    """Compute the costs ``(B, Q, G)`` of layers that have the same objects; images with fewer than G have any cost."""
    layers = [batch.layers[index] for index in indices]
    if scores is None or boxes is None or len(layers) < len(batch.layers):
        scores = torch.cat([layer.scores for layer in layers], 1)
        boxes = torch.cat([layer.boxes for layer in layers], 1)
    sizes = batch.to_device(torch.from_numpy(batch.sizes).to(boxes.dtype))  # (B, 4)
    corners = bbox_cxcywh_to_xyxy(boxes) * sizes[:, None]
    firsts = batch.objects_of(layers[0])
    counts = np.diff(firsts)
    if not all(
        type(cost) in BATCHED_COSTS and not getattr(cost, 'binary_input', False) for cost in assigner.match_costs
    ):
        return _apart(assigner, scores, corners, layers[0], counts.max())
    # The last object fills up.
    places = np.minimum(firsts[:-1, None] + np.arange(counts.max()), batch.first_objects[-1] - 1)
    places = batch.to_device(torch.from_numpy(places))  # (B, G)

    def of_image(scores: Tensor, corners: Tensor, labels: Tensor, object_corners: Tensor, size: Tensor) -> Tensor:
        predictions = InstanceData(scores=scores, bboxes=corners)
        width, height = size[:2]
        meta = dict(img_shape=(height, width))
        return cost_of(assigner, predictions, InstanceData(labels=labels, bboxes=object_corners), meta)

    with AsynchronousConstants():
        return torch.vmap(of_image)(scores, corners, batch.labels[places], batch.boxes[places], sizes)


# mmdet's costs that read no values, so that torch.vmap computes them for all images.
BATCHED_COSTS = (BBoxL1Cost, ClassificationCost, FocalLossCost, IoUCost)


def _apart(assigner: MMDetHungarianAssigner, scores: Tensor, corners: Tensor, layer: Layer, width: int) -> Tensor:
    """Compute the costs ``(B, Q, G)`` of one image after the other."""
    found = []
    for own, boxes, objects, meta in zip(scores, corners, layer.objects, layer.metas, strict=True):
        if not len(objects):
            found.append(corners.new_zeros(corners.shape[1], width))
            continue
        cost = cost_of(assigner, InstanceData(scores=own, bboxes=boxes), objects, meta)
        found.append(functional.pad(cost, (0, width - cost.shape[1])))
    return torch.stack(found)


def _moved(matched: Sequence[Sequence[np.ndarray]], device: torch.device) -> list[list[Tensor]]:
    """Move the matched pairs of all layers and images to a device in one copy."""
    every = [found for layer in matched for found in layer]
    if not every:
        return [[] for _ in matched]
    on_device = to_device(torch.from_numpy(np.concatenate(every, 1)), device)
    parts = iter(on_device.split([found.shape[1] for found in every], 1))
    return [[next(parts) for _ in layer] for layer in matched]


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


Head = TypeVar('Head', bound=nn.Module)


def match_once(head: Head) -> Head:
    """Change a DETR-like or Mask2Former head in place so that it matches all layers and images of a step at once.

    Raises:
        TypeError: It is no such head of mmdet or mmseg, or assigns by another class than HungarianAssigner.
    """
    if isinstance(head, (MatchedOnceHead, MatchedOnceMaskHead)):
        return head
    if not isinstance(head, (DETRHead, Mask2FormerHead)):
        raise TypeError(
            f'MatchedOnce: {type(head).__name__} is no head that derives from mmdet.DETRHead or mmdet.Mask2FormerHead.'
        )
    if not assigns_as_hungarian(head):
        raise TypeError(f'MatchedOnce: {type(head.assigner).__name__} does not assign as HungarianAssigner does.')
    # The constructor of DETRHead compares the class, so that it is changed afterwards.
    mixin = MatchedOnceHead if isinstance(head, DETRHead) else MatchedOnceMaskHead
    cls: Any = type(head)
    head.__class__ = derived_class(mixin, cls, 'MatchedOnce')
    return head


def assigns_as_hungarian(head: Any) -> bool:
    """Return True if a head's assigner computes what HungarianAssigner does, or if it has none, as in testing."""
    assigner = getattr(head, 'assigner', None)
    return assigner is None or getattr(type(assigner), 'assign', None) in _ASSIGN


_ASSIGN = (MMDetHungarianAssigner.assign, HungarianAssigner.assign)


# The parts of a head that all losses as one batch replace.
TARGETS = ('loss_by_feat_single', 'get_targets', '_get_targets_single')
DENOISING = ('loss_dn', '_loss_dn_single', 'get_dn_targets', '_get_dn_targets_single')
# Losses that are sums over predictions, divided by a number.
SUMS = (
    CrossEntropyLoss,
    FocalLoss,
    L1Loss,
    SmoothL1Loss,
    IoULoss,
    GIoULoss,
    DIoULoss,
    CIoULoss,
)


def _is_plain(head: Any, base: type[DETRHead] = DETRHead, own: Sequence[str] = TARGETS) -> bool:
    """Return True if a head computes its targets and losses as mmdet's DETRHead (or another, ``base``) does."""
    losses = (head.loss_cls, head.loss_bbox, head.loss_iou)
    return all(type(loss) in SUMS and loss.reduction == 'mean' for loss in losses) and all(
        host_method(MatchedOnceHead, head, name) is getattr(base, name) for name in own
    )
