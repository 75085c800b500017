"""Let mmdet's DETR-like heads match the predictions of all layers and images of a training step at once."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from mmdet.models.dense_heads import DETRHead
from mmdet.models.losses import QualityFocalLoss
from mmdet.models.task_modules.assigners import AssignResult
from mmdet.models.task_modules.assigners import HungarianAssigner as MMDetHungarianAssigner
from mmdet.structures.bbox import bbox_cxcywh_to_xyxy, bbox_xyxy_to_cxcywh
from mmdet.utils import reduce_mean
from mmengine.structures import InstanceData
from torch import Tensor

from .assigner import AsynchronousConstants, HungarianAssigner, as_result, cost_of, image_name, named_costs
from .pairs import match_pairs, to_device


class Layer(NamedTuple):
    """Predictions of one decoder layer for a batch, with the batch's annotated objects.

    Attributes:
        scores: Logits ``(B, Q, K)``.
        boxes: Boxes ``(B, Q, 4)`` as (cx, cy, w, h), 0 to 1.
        objects: Objects of each image: ``bboxes`` ``(G, 4)``, corners in pixels, and ``labels`` ``(G,)``.
        metas: Meta information of each image, with ``img_shape``.
    """

    scores: Tensor
    boxes: Tensor
    objects: list[InstanceData]
    metas: list[dict[str, Any]]


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

    The host's ``loss_by_feat`` runs with placeholders for the losses of its layers. Then all layers are matched, and
    the losses replace the placeholders.
    """

    assigner: Any
    _layers: list[Layer] | None = None

    def loss_by_feat(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Compute the head's losses, with all decoder layers matched at once; the arguments are those of mmdet."""
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
    ) -> tuple[Any, ...]:
        """Return a decoder layer's losses of classes, boxes and IoU, or placeholders until all layers are matched."""
        layer = Layer(cls_scores, bbox_preds, batch_gt_instances, batch_img_metas)
        if self._layers is None:
            return self._losses([layer])[0]
        self._layers.append(layer)
        return tuple(Placeholder(len(self._layers) - 1, part) for part in range(3))

    def _losses(self, layers: Sequence[Layer]) -> list[tuple[Tensor, ...]]:
        """Match all decoder layers at once, and return each layer's losses of classes, boxes and IoU."""
        if not layers:
            return []
        with AsynchronousConstants():
            matched = match(self.assigner, layers)
            if _is_plain(self):
                return self._plain_losses(layers, matched)
            moved = _moved(matched, layers[0].boxes.device)
            return [self._host_losses(layer, found) for layer, found in zip(layers, moved, strict=True)]

    def _host_losses(self, layer: Layer, matched: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Compute a layer's losses by mmdet's code, with an assigner that returns the pairs already known."""
        known = iter(matched)

        def assign(pred_instances: InstanceData, gt_instances: InstanceData, **_: object) -> AssignResult:
            return as_result(next(known), len(pred_instances), gt_instances.labels)

        assigner = self.assigner
        self.assigner = SimpleNamespace(assign=assign)
        try:
            return super().loss_by_feat_single(*layer)
        finally:
            self.assigner = assigner

    def _plain_losses(self, layers: Sequence[Layer], matched: Sequence[list[np.ndarray]]) -> list[tuple[Tensor, ...]]:
        """Compute all layers' losses from matched pairs, for heads with DETRHead's targets and losses."""
        device = layers[0].boxes.device
        pairs = [_flat(layer, pairs_of_images) for layer, pairs_of_images in zip(layers, matched, strict=True)]
        counts = [of_layer.shape[1] for of_layer in pairs]
        pairs_on_device = to_device(torch.from_numpy(np.concatenate(pairs, 1)), device).split(counts, 1)
        factors = self._average_factors(layers, counts)
        # Most often all layers share one batch of objects.
        batches = {id(layer.objects): layer for layer in layers}
        targets = {batch: _targets(layer) for batch, layer in batches.items()}
        losses = []
        for layer, (rows, columns), factor in zip(layers, pairs_on_device, factors, strict=True):
            matched_targets = [target.index_select(0, columns) for target in targets[id(layer.objects)]]
            losses.append(self._plain_loss(layer, rows, matched_targets, factor))
        return losses

    def _plain_loss(
        self, layer: Layer, rows: Tensor, targets: list[Tensor], factor: tuple[float | Tensor, Tensor]
    ) -> tuple[Tensor, ...]:
        """Compute one layer's losses of classes, boxes and IoU from its matched pairs.

        Args:
            layer: Predictions.
            rows: Indices of the matched predictions in the batch ``(N,)``.
            targets: Labels ``(N,)``, boxes ``(N, 4)`` and image sizes ``(N, 4)`` of their objects.
            factor: Divisors of the losses of classes and of boxes.
        """
        scores = layer.scores.reshape(-1, self.cls_out_channels)
        boxes = layer.boxes.reshape(-1, 4)
        object_labels, object_boxes, sizes = targets
        class_factor, box_factor = factor
        labels = object_labels.new_full((len(scores),), self.num_classes, dtype=torch.long)
        labels[rows] = object_labels
        loss_cls = self.loss_cls(scores, labels, object_boxes.new_ones(len(scores)), avg_factor=class_factor)
        # mmdet gives unmatched boxes the weight 0, and waits for the device to see if any weight is not 0.
        boxes = boxes.index_select(0, rows)
        corners = bbox_cxcywh_to_xyxy(boxes) * sizes
        object_corners = bbox_cxcywh_to_xyxy(object_boxes) * sizes
        loss_iou = self.loss_iou(corners, object_corners, avg_factor=box_factor)
        loss_bbox = self.loss_bbox(boxes, object_boxes, avg_factor=box_factor)
        # Without boxes the loss of overlaps has no gradient, and the sum of no boxes is 0 with a gradient.
        if not len(rows):
            loss_iou = boxes.sum()
        return loss_cls, loss_bbox, loss_iou

    def _average_factors(
        self, layers: Sequence[Layer], positives: Sequence[int]
    ) -> list[tuple[float | Tensor, Tensor]]:
        """Return the numbers by which each layer's losses of classes and of boxes are divided, means over processes."""
        totals = [layer.boxes.shape[0] * layer.boxes.shape[1] for layer in layers]
        # As in mmdet, unmatched predictions count by the weight of the background.
        weights = [p * 1.0 + (n - p) * self.bg_cls_weight for p, n in zip(positives, totals, strict=True)]
        counts = [float(count) for count in positives]
        numbers = to_device(torch.tensor([weights, counts]), layers[0].boxes.device)
        of_classes, of_boxes = reduce_mean(numbers).clamp(min=1)
        of_process = [max(weight, 1) for weight in weights]
        return list(zip(of_classes if self.sync_cls_avg_factor else of_process, of_boxes, strict=True))


def match(assigner: MMDetHungarianAssigner, layers: Sequence[Layer]) -> list[list[np.ndarray]]:
    """Match the predictions of all layers and images to their objects with one GPU synchronisation.

    Returns:
        For each layer and image the matched predictions, ascending, and their objects, ``(2, N)``.

    Raises:
        ConfigError: A cost is NaN or infinite; the message names the layer, the image and the cost.
    """
    # The layer and the image of each matrix of costs.
    places: list[tuple[int, int]] = []
    costs: list[Tensor] = []
    for group in _groups(layers):
        first = layers[group[0]]
        for image, (objects, meta) in enumerate(zip(first.objects, first.metas, strict=True)):
            queries = [layers[index].boxes.shape[1] for index in group]
            if not len(objects) or not sum(queries):
                continue
            cost = cost_of(assigner, _predictions([layers[index] for index in group], image), objects, meta)
            costs += cost.split(queries)
            places += [(index, image) for index in group]
    matched = [[np.empty((2, 0), np.int64)] * len(layer.objects) for layer in layers]
    if costs:
        on_host = torch.cat([cost.flatten() for cost in costs]).cpu()
        pieces = on_host.split([cost.numel() for cost in costs])
        for (index, image), cost, piece in zip(places, costs, pieces, strict=True):
            layer = layers[index]
            place = f'layer {index + 1} of {len(layers)}, {image_name(layer.metas[image])}'
            parts = functools.partial(_parts, assigner, layer, image)
            matched[index][image] = match_pairs(piece.view(cost.shape), place, parts)
    return matched


def _predictions(layers: Sequence[Layer], image: int) -> InstanceData:
    """Join the predictions of layers for one image, with boxes as costs take them: corners in pixels."""
    scores = torch.cat([layer.scores[image] for layer in layers]).detach()
    boxes = torch.cat([layer.boxes[image] for layer in layers]).detach()
    height, width = layers[0].metas[image]['img_shape']
    boxes = bbox_cxcywh_to_xyxy(boxes) * boxes.new_tensor([[width, height, width, height]])
    return InstanceData(scores=scores, bboxes=boxes)


def _parts(assigner: MMDetHungarianAssigner, layer: Layer, image: int) -> list[tuple[str, Tensor]]:
    """Compute each cost of a layer's predictions for one image, with its name."""
    return named_costs(assigner, _predictions([layer], image), layer.objects[image], layer.metas[image])


def _moved(matched: Sequence[Sequence[np.ndarray]], device: torch.device) -> list[list[Tensor]]:
    """Move the matched pairs of all layers and images to a device in one copy."""
    every = [found for layer in matched for found in layer]
    if not every:
        return [[] for _ in matched]
    on_device = to_device(torch.from_numpy(np.concatenate(every, 1)), device)
    parts = iter(on_device.split([found.shape[1] for found in every], 1))
    return [[next(parts) for _ in layer] for layer in matched]


def _groups(layers: Sequence[Layer]) -> list[list[int]]:
    """Group the layers that have the same objects, for computing their costs together.

    On a CPU every layer is a group, because there the last bit of a number depends on its place in the tensor, and
    assignments have to equal mmdet's.
    """
    groups: dict[int, list[int]] = {}
    for index, layer in enumerate(layers):
        groups.setdefault(index if layer.boxes.device.type == 'cpu' else id(layer.objects), []).append(index)
    return list(groups.values())


def _flat(layer: Layer, matched: Sequence[np.ndarray]) -> np.ndarray:
    """Join the pairs of all images to indices into the batch's predictions and objects, ``(2, N)``."""
    queries = layer.boxes.shape[1]
    passed = 0
    shifted = []
    for image, (found, objects) in enumerate(zip(matched, layer.objects, strict=True)):
        shifted.append(found + np.array([[image * queries], [passed]]))
        passed += len(objects)
    return np.concatenate(shifted, 1)


def _targets(layer: Layer) -> tuple[Tensor, Tensor, Tensor]:
    """Return labels ``(G,)``, boxes (cx, cy, w, h) ``(G, 4)`` and image sizes ``(G, 4)`` of a batch's objects."""
    shapes = []
    for meta, objects in zip(layer.metas, layer.objects, strict=True):
        height, width = meta['img_shape']
        shapes += [(width, height, width, height)] * len(objects)
    sizes = to_device(torch.tensor(shapes, dtype=layer.boxes.dtype).view(-1, 4), layer.boxes.device)
    labels = torch.cat([objects.labels for objects in layer.objects])
    boxes = torch.cat([objects.bboxes for objects in layer.objects])
    return labels, bbox_xyxy_to_cxcywh(boxes / sizes), sizes


def match_once(head: DETRHead) -> DETRHead:
    """Change a DETR-like head in place so that it matches all layers and images of a training step at once.

    Raises:
        TypeError: It is no DETR-like head of mmdet, or assigns by another class than HungarianAssigner.
    """
    if not isinstance(head, DETRHead):
        raise TypeError(f'MatchedOnce: {type(head).__name__} is no head that derives from mmdet.DETRHead.')
    assigner = getattr(head, 'assigner', None)
    if assigner is not None and getattr(type(assigner), 'assign', None) not in _ASSIGN:
        raise TypeError(f'MatchedOnce: {type(assigner).__name__} does not assign as HungarianAssigner does.')
    # The constructor of DETRHead compares the class, so that it is changed afterwards.
    head.__class__ = _derived(type(head))  # type: ignore[arg-type]
    return head


_ASSIGN = (MMDetHungarianAssigner.assign, HungarianAssigner.assign)


@functools.cache
def _derived(host: type[DETRHead]) -> type[DETRHead]:
    """Return the subclass of a head's class that matches all decoder layers at once."""
    return type(f'MatchedOnce{host.__name__}', (MatchedOnceHead, host), {})


def _is_plain(head: DETRHead) -> bool:
    """Return True if a head computes its targets and losses as mmdet's DETRHead does."""
    host = type(head).__mro__[2]
    own = ('loss_by_feat_single', 'get_targets', '_get_targets_single')
    return not isinstance(head.loss_cls, QualityFocalLoss) and all(
        getattr(host, name) is getattr(DETRHead, name) for name in own
    )
