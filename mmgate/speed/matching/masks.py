"""Let Mask2Former's heads match all layers and images at once, and compute all layers' losses as one batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from mmdet.models.dense_heads import Mask2FormerHead
from mmdet.models.losses import CrossEntropyLoss, DiceLoss
from mmdet.models.task_modules.assigners import (
    ClassificationCost,
    CrossEntropyLossCost,
    DiceCost,
    FocalLossCost,
)
from mmdet.models.task_modules.samplers import MaskPseudoSampler
from mmdet.models.utils import get_uncertain_point_coords_with_randomness
from mmdet.utils import reduce_mean
from mmengine.structures import InstanceData
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from mmgate.speed.derived import host_method

from .assigner import AsynchronousConstants, cost_of
from .pairs import Problem, match_all, to_device

COSTS = (ClassificationCost, CrossEntropyLossCost, DiceCost, FocalLossCost)
# Numbers in a tensor of several layers' points, 16 MiB. More are computed in parts, so that memory is about mmdet's.
NUMBERS = 2**22


class MatchedOnceMaskHead(Mask2FormerHead):
    """Mixin for a Mask2Former head (mmdet's and mmseg's) that matches all layers at once and computes their losses.

    See :func:`mmgate.speed.matching.head.match_once`.
    """

    assigner: Any

    def loss_by_feat(
        self,
        all_cls_scores: Sequence[Tensor],
        all_mask_preds: Sequence[Tensor],
        batch_gt_instances: list[InstanceData],
        batch_img_metas: list[dict[str, Any]],
    ) -> dict[str, Tensor]:
        """Compute the head's losses, with all layers matched at once; arguments and result are those of mmdet."""
        if not _is_plain(self):
            return super().loss_by_feat(all_cls_scores, all_mask_preds, batch_gt_instances, batch_img_metas)
        with AsynchronousConstants():
            losses = self._losses(all_cls_scores, all_mask_preds, batch_gt_instances)
        names = ('loss_cls', 'loss_mask', 'loss_dice')
        *others, last = zip(*(of_layers.unbind() for of_layers in losses), strict=True)
        found = dict(zip(names, last, strict=True))
        for index, of_layer in enumerate(others):
            found |= {f'd{index}.{name}': loss for name, loss in zip(names, of_layer, strict=True)}
        return found

    def _losses(
        self, all_scores: Sequence[Tensor], all_masks: Sequence[Tensor], batch_objects: Sequence[InstanceData]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the losses of classes, of masks and of Dice of all layers, ``(L,)`` each."""
        scores = torch.stack(list(all_scores))  # (L, B, Q, K + 1)
        device = scores.device
        layers, images, queries = scores.shape[:3]
        counts = [len(objects) for objects in batch_objects]
        firsts = np.cumsum([0, *counts])
        labels = torch.cat([objects.labels for objects in batch_objects])  # (G,)
        object_masks = torch.cat([objects.masks.float() for objects in batch_objects])[:, None]  # (G, 1, H, W)
        pairs_of_image = [min(count, queries) for count in counts]
        pairs = sum(pairs_of_image)
        parts = _slices(layers, pairs * int(self.num_points * self.oversample_ratio) * 2)
        points, drawn = self._draw(parts, images, pairs, device)

        matched = np.zeros((layers, 2, 0), np.int64)
        if pairs:
            costs = self._costs(scores, all_masks, labels, object_masks, points, firsts)
            matched = _flat(costs.cpu(), firsts)
        # The predictions of each layer among its B * Q, and their objects.
        rows, columns = to_device(torch.from_numpy(matched.transpose(1, 0, 2).copy()), device)  # (L, N) each

        classes = labels.new_full((layers, images * queries), self.num_classes, dtype=torch.long)
        classes = classes.scatter(1, rows, labels.to(torch.long)[columns])
        of_scores = self.loss_cls(scores.flatten(0, 2), classes.flatten(), reduction_override='none')
        weights = scores.new_tensor(self.class_weight)[classes].sum(1)
        losses_cls = of_scores.reshape(layers, -1).sum(1) / (weights + torch.finfo(torch.float32).eps)

        # Processes without an object take part, too: the others wait for them.
        total = reduce_mean(scores.new_tensor([float(sum(max(count, 1) for count in pairs_of_image))])).clamp(min=1)
        found = []
        for part in parts:
            chosen = [
                of_layer.flatten(0, 1).index_select(0, own)
                for of_layer, own in zip(all_masks[part], rows[part], strict=True)
            ]
            masks = chosen[0] if len(chosen) == 1 else torch.cat(chosen)
            del chosen
            of_pairs = self._losses_of_pairs(masks[:, None], object_masks, drawn.pop(0), matched[part, 1])
            found.append(of_pairs.reshape(2, -1, max(pairs, 1)).sum(2))
        of_masks, of_dice = torch.cat(found, 1).unbind()
        return losses_cls, of_masks / (total * self.num_points), of_dice / total

    def _losses_of_pairs(
        self, masks: Tensor, object_masks: Tensor, drawn: tuple[Tensor, Tensor], objects: np.ndarray
    ) -> Tensor:
        """Compute the losses of masks, summed over points, and of Dice, ``(2, L * N)``, of the pairs of L layers.

        Args:
            masks: Logits of the matched predictions ``(L * N, 1, h, w)``.
            object_masks: Masks of all objects ``(G, 1, H, W)``.
            drawn: Random points, as :meth:`_draw` returns them for these layers.
            objects: The object of each pair ``(L, N)``.
        """
        if not objects.size:
            return masks.sum().expand(2, len(objects))
        at = self._uncertain(masks.detach(), *drawn)  # (L * N, P, 2)
        targets = _of_objects(object_masks, at, objects)
        predicted = _sample(masks, at[:, None])[:, 0, 0]  # (L * N, P)
        of_masks = self.loss_mask(predicted, targets, reduction_override='none')
        of_dice = self.loss_dice(predicted, targets, reduction_override='none')
        return torch.stack((of_masks.reshape(len(predicted), -1).sum(1), of_dice))

    def _draw(
        self, parts: Sequence[slice], images: int, pairs: int, device: torch.device
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Draw all random points, in one call for each part: on a CPU, those that mmdet draws one after the other.

        Returns:
            Points to match ``(L, B, P, 2)``. For each part of the layers, points of which the most uncertain are taken
            ``(L, N, S, 2)``, and others that are taken as they are ``(L, N, R, 2)``.
        """
        others = self.num_points - int(self.importance_sample_ratio * self.num_points)
        shapes = [(images, self.num_points), (pairs, int(self.num_points * self.oversample_ratio)), (pairs, others)]
        sizes = [count * points * 2 for count, points in shapes]
        to_match, drawn = [], []
        for part in parts:
            numbers = torch.rand(part.stop - part.start, sum(sizes), device=device).split(sizes, 1)
            first, second, third = (x.unflatten(1, (*shape, 2)) for x, shape in zip(numbers, shapes, strict=True))
            to_match.append(first)
            drawn.append((second, third))
        return torch.cat(to_match), drawn

    @torch.no_grad()
    def _costs(
        self,
        scores: Tensor,
        all_masks: Sequence[Tensor],
        labels: Tensor,
        object_masks: Tensor,
        points: Tensor,
        firsts: np.ndarray,
    ) -> Tensor:
        """Compute the costs of all layers ``(L, B, Q, G)``; images with fewer than G objects have any cost."""
        layers, images, queries = scores.shape[:3]
        counts = np.diff(firsts)
        # The last object fills up.
        places = np.minimum(firsts[:-1, None] + np.arange(counts.max()), firsts[-1] - 1)
        places = to_device(torch.from_numpy(places), scores.device)  # (B, G)
        image_of_object = to_device(torch.from_numpy(np.repeat(np.arange(images), counts)), scores.device)

        def of_image(scores: Tensor, masks: Tensor, labels: Tensor, objects: Tensor) -> Tensor:
            predictions = InstanceData(scores=scores, masks=masks)
            return cost_of(self.assigner, predictions, InstanceData(labels=labels, masks=objects), {})

        of_images = torch.vmap(of_image)
        of_layers = torch.vmap(of_images, in_dims=(0, 0, None, 2))
        found = []
        for part in _slices(layers, (images * queries + 2 * int(firsts[-1])) * self.num_points):
            at_images = _grid(points[part]).transpose(0, 1)  # (B, L, P, 2)
            of_objects = functional.grid_sample(  # (G of all images, 1, L, P)
                object_masks, at_images.index_select(0, image_of_object), align_corners=False
            )
            values = of_objects[:, 0][places]  # (B, G, L, P)
            del of_objects
            masks = [
                _sample(mask, at[:, None])[:, :, 0] for mask, at in zip(all_masks[part], points[part], strict=True)
            ]
            found.append(of_layers(scores[part], torch.stack(masks), labels[places], values))
        return torch.cat(found) if len(found) > 1 else found[0]

    @torch.no_grad()
    def _uncertain(self, masks: Tensor, sampled: Tensor, random: Tensor) -> Tensor:
        """Choose the points of losses ``(L * N, P, 2)`` by mmdet's rule, from points that are drawn already."""
        with _Drawn([numbers.flatten(0, 1).contiguous() for numbers in (sampled, random)]):
            return get_uncertain_point_coords_with_randomness(
                masks, None, self.num_points, self.oversample_ratio, self.importance_sample_ratio
            )

    def _seg_data_to_instance_data(self, batch_data_samples: Sequence[Any]) -> Any:
        """Turn maps of classes into masks of the classes that they have (mmseg), with one wait for all images."""
        method = host_method(MatchedOnceMaskHead, self, '_seg_data_to_instance_data')
        if getattr(method, '__module__', None) != 'mmseg.models.decode_heads.mask2former_head':
            return super()._seg_data_to_instance_data(batch_data_samples)
        maps = torch.cat([sample.gt_sem_seg.data for sample in batch_data_samples])  # (B, H, W)
        places = torch.where(maps == self.ignore_index, self.num_classes, maps).flatten(1).long()
        there = torch.zeros(len(maps), self.num_classes + 1, dtype=torch.bool, device=maps.device)
        there = there.scatter(1, places, True)
        found = np.stack(there.cpu().numpy()[:, : self.num_classes].nonzero())
        counts = np.bincount(found[0], minlength=len(maps)).tolist()
        image_of, labels = to_device(torch.from_numpy(found), maps.device)
        masks = (maps[image_of] == labels[:, None, None]).long()
        labels = labels.to(maps.dtype)
        objects = [
            InstanceData(labels=own, masks=mask)
            for own, mask in zip(labels.split(counts), masks.split(counts), strict=True)
        ]
        return objects, [sample.metainfo for sample in batch_data_samples]


def _slices(layers: int, numbers: int) -> list[slice]:
    """Return slices of the layers that have at most :data:`NUMBERS` numbers, if a layer has so many, or one layer."""
    at_once = min(layers, max(1, NUMBERS // max(numbers, 1)))
    return [slice(start, min(start + at_once, layers)) for start in range(0, layers, at_once)]


def _sample(maps: Tensor, points: Tensor) -> Tensor:
    """Interpolate maps ``(N, C, H, W)`` at points ``(N, R, P, 2)`` between 0 and 1, to ``(N, C, R, P)``."""
    return functional.grid_sample(maps, _grid(points), align_corners=False)


def _grid(points: Tensor) -> Tensor:
    """Return points between 0 and 1 as grid_sample takes them, between -1 and 1."""
    return points * 2.0 - 1.0


@torch.no_grad()
def _of_objects(object_masks: Tensor, points: Tensor, objects: np.ndarray) -> Tensor:
    """Interpolate the mask of each pair's object at the pair's points.

    Args:
        object_masks: Masks of all objects ``(G, 1, H, W)``, which are not copied for each layer.
        points: Points of each pair ``(L * N, P, 2)``.
        objects: The object of each pair ``(L, N)``.

    Returns:
        Values ``(L * N, P)``.
    """
    layers, pairs = objects.shape
    # The pair of each object and layer; of an object without one, any.
    pair_of = np.zeros((len(object_masks), layers), np.int64)
    layer_of = np.repeat(np.arange(layers)[:, None], pairs, 1)
    pair_of[objects, layer_of] = np.arange(layers * pairs).reshape(layers, pairs)
    pair_of_object = to_device(torch.from_numpy(pair_of), points.device)
    place_of_pair = to_device(torch.from_numpy((objects * layers + layer_of).ravel()), points.device)
    values = functional.grid_sample(object_masks, _grid(points)[pair_of_object], align_corners=False)  # (G, 1, L, P)
    return values.flatten(0, 2).index_select(0, place_of_pair)


def _flat(costs: Tensor, firsts: np.ndarray) -> np.ndarray:
    """Match all layers and images: return each layer's predictions among ``B * Q`` and their objects, ``(L, 2, N)``."""
    layers, images, queries = costs.shape[:3]
    counts = np.diff(firsts)
    problems = [
        Problem(
            costs[layer, image, :, : counts[image]], f'layer {layer + 1} of {layers}, image {image + 1} of the batch'
        )
        for layer in range(layers)
        for image in range(images)
    ]
    found = match_all(problems)
    shifts = [[[image * queries], [firsts[image]]] for image in range(images)] * layers
    shifted = [own + np.array(shift) for own, shift in zip(found, shifts, strict=True)]
    return np.stack([np.concatenate(shifted[start : start + images], 1) for start in range(0, len(shifted), images)])


class _Drawn(TorchFunctionMode):
    """Torch function mode in which ``torch.rand`` returns numbers that are drawn already, one after the other."""

    def __init__(self, numbers: Sequence[Tensor]) -> None:
        super().__init__()
        self.numbers: Iterator[Tensor] = iter(numbers)

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        return next(self.numbers) if func is torch.rand else func(*args, **(kwargs or {}))


def _is_plain(head: Mask2FormerHead) -> bool:
    """Return True if a head computes its targets and losses as mmdet's Mask2FormerHead does."""
    own = ('loss_by_feat', 'get_targets', '_loss_by_feat_single', '_get_targets_single')
    losses = (head.loss_cls, head.loss_mask, head.loss_dice)
    return (
        all(host_method(MatchedOnceMaskHead, head, name) is getattr(Mask2FormerHead, name) for name in own)
        and [type(loss) for loss in losses] == [CrossEntropyLoss, CrossEntropyLoss, DiceLoss]
        and all(loss.reduction == 'mean' for loss in losses)
        and (not head.loss_cls.use_sigmoid and head.loss_mask.use_sigmoid)
        and type(head.sampler) is MaskPseudoSampler
        and all(type(cost) in COSTS for cost in head.assigner.match_costs)
    )
