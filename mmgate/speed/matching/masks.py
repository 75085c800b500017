"""Let Mask2Former's heads match the predictions of all layers and images at once, and wait once for the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from mmdet.models.dense_heads import Mask2FormerHead
from mmdet.models.losses import CrossEntropyLoss, DiceLoss
from mmdet.models.task_modules.assigners import ClassificationCost, CrossEntropyLossCost, DiceCost, FocalLossCost
from mmdet.models.task_modules.samplers import MaskPseudoSampler
from mmdet.utils import reduce_mean
from mmengine.structures import InstanceData
from torch import Tensor
from torch.nn import functional

from mmgate.speed.derived import host_method

from .pairs import assigns_by, image_name, match_pairs, padded, to_device

COSTS = (ClassificationCost, CrossEntropyLossCost, DiceCost, FocalLossCost)


class MatchedOnceMaskHead(Mask2FormerHead):
    """Mixin for a Mask2Former head (mmdet's and mmseg's) that matches all layers at once.

    Points are drawn, and masks interpolated at them, for all images of a layer at once. The layers follow each other,
    because their points would take much more memory than mmdet does.
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
        if not is_plain(self):
            return super().loss_by_feat(all_cls_scores, all_mask_preds, batch_gt_instances, batch_img_metas)
        scores = torch.stack(list(all_cls_scores))  # (L, B, Q, K + 1)
        layers, images, queries = scores.shape[:3]
        counts = [len(objects) for objects in batch_gt_instances]
        firsts = np.cumsum([0, *counts])
        labels = torch.cat([objects.labels for objects in batch_gt_instances])  # (G,)
        object_masks = torch.cat([objects.masks.float() for objects in batch_gt_instances])[:, None]  # (G, 1, H, W)
        pairs_of_image = [min(count, queries) for count in counts]
        points = [self._draw(images, sum(pairs_of_image), scores.device) for _ in range(layers)]

        matched = np.zeros((layers, 2, 0), np.int64)
        if firsts[-1]:
            costs = [
                self._costs(own, masks, labels, object_masks, drawn[0], firsts)
                for own, masks, drawn in zip(scores, all_mask_preds, points, strict=True)
            ]
            matched = _matched(self.assigner, torch.stack(costs), firsts, batch_img_metas)
        # The predictions of each layer among its B * Q, and their objects.
        rows, columns = to_device(matched.transpose(1, 0, 2).copy(), scores.device)  # (L, N) each

        classes = labels.new_full((layers, images * queries), self.num_classes, dtype=torch.long)
        classes = classes.scatter(1, rows, labels.to(torch.long)[columns])
        weights = to_device(torch.tensor(self.class_weight, dtype=scores.dtype), scores.device)
        of_scores = functional.cross_entropy(scores.flatten(0, 2), classes.flatten(), weights, reduction='none')
        of_scores = of_scores.reshape(layers, -1).sum(1) * self.loss_cls.loss_weight
        losses_cls = of_scores / (weights[classes].sum(1) + torch.finfo(torch.float32).eps)

        # Processes without an object take part, too: the others wait for them.
        number = torch.tensor([float(sum(max(count, 1) for count in pairs_of_image))], dtype=scores.dtype)
        total = reduce_mean(to_device(number, scores.device)).clamp(min=1)
        found = {}
        for index in range(layers):
            masks = all_mask_preds[index].flatten(0, 1).index_select(0, rows[index])[:, None]  # (N, 1, h, w)
            _, sampled, random = points.pop(0)  # whose memory is free after the layer
            of_masks, of_dice = self._losses_of_pairs(masks, object_masks, columns[index], sampled, random)
            del sampled, random
            prefix = f'd{index}.' if index < layers - 1 else ''
            found[index] = {
                f'{prefix}loss_cls': losses_cls[index],
                f'{prefix}loss_mask': (of_masks / (total * self.num_points)).squeeze(0),
                f'{prefix}loss_dice': (of_dice / total).squeeze(0),
            }
        order = [layers - 1, *range(layers - 1)]  # mmdet's
        return {name: loss for index in order for name, loss in found[index].items()}

    def _draw(self, images: int, pairs: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Draw a layer's random points: on a CPU, those that mmdet draws image by image.

        Returns:
            Points to match ``(B, P, 2)``, points of which the most uncertain are taken ``(N, S, 2)``, and others that
            are taken as they are ``(N, R, 2)``.
        """
        others = self.num_points - int(self.importance_sample_ratio * self.num_points)
        shapes = [(images, self.num_points), (pairs, int(self.num_points * self.oversample_ratio)), (pairs, others)]
        first, second, third = (torch.rand(*shape, 2, device=device) for shape in shapes)
        return first, second, third

    @torch.no_grad()
    def _costs(
        self,
        scores: Tensor,
        masks: Tensor,
        labels: Tensor,
        object_masks: Tensor,
        points: Tensor,
        firsts: np.ndarray,
    ) -> Tensor:
        """Compute the C costs of a layer ``(B, C, Q, G)``; images with fewer than G objects have any cost."""
        places = to_device(padded(firsts), scores.device)  # (B, G)
        image_of_object = to_device(np.repeat(np.arange(len(scores)), np.diff(firsts)), scores.device)
        of_objects = _sample(object_masks, points[image_of_object])[:, 0]  # (G of all images, P)
        of_masks = _sample(masks, points)  # (B, Q, P)

        def of_image(scores: Tensor, masks: Tensor, labels: Tensor, objects: Tensor) -> Tensor:
            predictions = InstanceData(scores=scores, masks=masks)
            truth = InstanceData(labels=labels, masks=objects)
            return torch.stack([cost(predictions, truth).float() for cost in self.assigner.match_costs])

        return torch.vmap(of_image)(scores, of_masks, labels[places], of_objects[places])

    def _losses_of_pairs(
        self, masks: Tensor, object_masks: Tensor, objects: Tensor, sampled: Tensor, random: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute the sums of the losses of masks over points, and of Dice, of a layer's pairs.

        Args:
            masks: Logits of the matched predictions ``(N, 1, h, w)``.
            object_masks: Masks of all objects ``(G, 1, H, W)``.
            objects: The object of each pair ``(N,)``.
            sampled: Random points, of which the most uncertain are taken, ``(N, S, 2)``.
            random: Random points that are taken as they are ``(N, R, 2)``.
        """
        if not len(masks):
            return masks.sum(), masks.sum()
        with torch.no_grad():  # mmdet's rule
            certain = _sample(masks, sampled)[:, 0].abs()  # (N, S)
            chosen = certain.neg().topk(self.num_points - random.shape[1], 1).indices
            points = torch.cat((sampled.gather(1, chosen[..., None].expand(-1, -1, 2)), random), 1)  # (N, P, 2)
            targets = _sample(object_masks[objects], points)[:, 0]  # (N, P)
        predicted = _sample(masks, points)[:, 0]
        of_masks = self.loss_mask(predicted, targets, reduction_override='none')
        return of_masks.sum(), self.loss_dice(predicted, targets, reduction_override='none').sum()

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
        image_of, labels = to_device(found, maps.device)
        masks = (maps[image_of] == labels[:, None, None]).long()
        labels = labels.to(maps.dtype)
        objects = [
            InstanceData(labels=own, masks=mask)
            for own, mask in zip(labels.split(counts), masks.split(counts), strict=True)
        ]
        return objects, [sample.metainfo for sample in batch_data_samples]


def _sample(maps: Tensor, points: Tensor) -> Tensor:
    """Interpolate maps ``(N, C, H, W)`` at points ``(N, P, 2)`` between 0 and 1, to ``(N, C, P)``."""
    return functional.grid_sample(maps, points[:, None] * 2.0 - 1.0, align_corners=False)[:, :, 0]


def _matched(assigner: Any, costs: Tensor, firsts: np.ndarray, metas: Sequence[dict[str, Any]]) -> np.ndarray:
    """Match all layers and images by costs ``(L, B, C, Q, G)``.

    Returns:
        Each layer's predictions among ``B * Q`` and their objects, ``(L, 2, N)``.
    """
    totals = costs.sum(2).cpu()
    found = []
    for layer, total in enumerate(totals):
        of_layer = []
        for image, count in enumerate(np.diff(firsts)):
            place = f'layer {layer + 1} of {len(totals)}, {image_name(metas[image])}'
            own = match_pairs(assigner, total[image, :, :count], costs[layer, image, :, :, :count], place)
            of_layer.append(own + np.array([[image * total.shape[1]], [firsts[image]]]))
        found.append(np.concatenate(of_layer, 1))
    return np.stack(found)


def is_plain(head: Any) -> bool:
    """Return True if a head computes its targets and losses as mmdet's Mask2FormerHead does."""
    own = ('loss_by_feat', 'get_targets', '_loss_by_feat_single', '_get_targets_single')
    losses = (head.loss_cls, head.loss_mask, head.loss_dice)
    return (
        all(host_method(MatchedOnceMaskHead, head, name) is getattr(Mask2FormerHead, name) for name in own)
        and [type(loss) for loss in losses] == [CrossEntropyLoss, CrossEntropyLoss, DiceLoss]
        and all(loss.reduction == 'mean' for loss in losses)
        and (not head.loss_cls.use_sigmoid and head.loss_mask.use_sigmoid)
        and type(head.sampler) is MaskPseudoSampler
        and assigns_by(head, COSTS)
    )
