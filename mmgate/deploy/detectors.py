"""Detectors of mmdet as networks of tensors: boxes, scores and labels in the graph, masks of boxes too."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from mmcv.ops import RoIAlign
from mmdet.models.dense_heads import AnchorHead
from mmdet.models.detectors import (
    DINO,
    DeformableDETR,
    Mask2Former,
    MaskFormer,
    SingleStageDetector,
    TwoStageDetector,
)
from mmdet.models.roi_heads import StandardRoIHead
from mmdet.models.roi_heads.mask_heads import FCNMaskHead
from mmdet.models.roi_heads.roi_extractors import SingleRoIExtractor
from mmdet.structures.bbox import bbox_cxcywh_to_xyxy
from mmengine.structures import BaseDataElement, InstanceData
from torch import Tensor, nn

from .boxes import Boxes, best, candidates, cut, decode
from .network import Network, refuse
from .roi_align import Align, pyramid_roi_align


class BoxNetwork(Network):
    """A network that returns boxes.

    Outputs: ``boxes`` ``(B, K, 4)`` as (x1, y1, x2, y2) in pixels of the input, ``scores`` ``(B, K)``, the best first,
    -1 in empty places, and ``labels`` ``(B, K)``, int64; K is the config's ``max_per_img``.
    """

    def results(self, outputs: Sequence[Tensor], samples: Any, rescale: bool) -> list[InstanceData]:
        """Return the boxes of each image, and masks in the size of the original if there are."""
        return [
            self._result(tuple(output[number] for output in outputs), sample.metainfo, rescale)
            for number, sample in enumerate(samples)
        ]

    def settings(self) -> dict[str, Any]:
        """Return the head's."""
        return self.host.bbox_head.test_cfg

    def _result(self, outputs: tuple[Tensor, ...], meta: dict[str, Any], rescale: bool) -> InstanceData:
        boxes, scores, labels = (output[outputs[1] > 0] for output in outputs[:3])
        if rescale:
            boxes = boxes / boxes.new_tensor(meta['scale_factor']).repeat(2)
        return InstanceData(bboxes=boxes, scores=scores, labels=labels)


class QueryNetwork(BoxNetwork):
    """Deformable DETR and DINO; padding is masked as mmdet masks it."""

    def __init__(self, host: nn.Module) -> None:
        super().__init__(host)
        if type(host) not in (DeformableDETR, DINO):
            raise refuse(host, 'of the query-based detectors Deformable DETR and DINO can be')

    def forward(self, images: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return boxes, scores and labels of images ``(B, 3, H, W)`` of ``sizes`` ``(B, 2)`` within the padding."""
        logits, boxes = self._queries(images, sizes)
        head = self.host.bbox_head
        count = head.test_cfg.get('max_per_img', boxes.shape[1])
        if head.loss_cls.use_sigmoid:
            scores, index = logits.sigmoid().flatten(1).topk(count)
            labels, place = index % head.num_classes, index // head.num_classes
        else:
            scores, labels = logits.softmax(-1)[..., :-1].max(-1)
            scores, place = scores.topk(count)
            labels = labels.gather(1, place)
        boxes = bbox_cxcywh_to_xyxy(boxes.gather(1, place[..., None].expand(-1, -1, 4)))
        return cut(boxes * sizes.flip(-1).repeat(1, 2)[:, None].to(boxes.dtype), sizes), scores, labels

    def _queries(self, images: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits ``(B, Q, C)`` and boxes ``(B, Q, 4)`` as (centre, size), 0 to 1 over the unpadded image."""
        host, size = self.host, images.shape[-2:]
        features = host.extract_feat(images)
        # as if there were no padding, for which mmdet loops over the images; masks and what follows from them is below
        whole = SimpleNamespace(batch_input_shape=size, img_shape=size)
        to_encoder, to_decoder = host.pre_transformer(features, [whole] * 2)
        rows, columns = (torch.arange(n, device=images.device) for n in size)
        padding = (rows[:, None] >= sizes[:, :1, None]) | (columns >= sizes[:, 1:, None])  # (B, H, W)
        masks = [
            F.interpolate(padding[:, None].to(images.dtype), size=feature.shape[-2:])[:, 0] > 0.5
            for feature in features
        ]
        positions = [
            (host.positional_encoding(mask).flatten(2) + level[:, None]).transpose(1, 2)
            for mask, level in zip(masks, host.level_embed, strict=True)
        ]
        mask = torch.cat([mask.flatten(1) for mask in masks], 1)
        ratios = torch.stack([host.get_valid_ratio(mask) for mask in masks], 1)
        to_encoder.update(feat_mask=mask, feat_pos=torch.cat(positions, 1), valid_ratios=ratios)
        to_decoder.update(memory_mask=mask, valid_ratios=ratios)
        more, to_head = host.pre_decoder(**host.forward_encoder(**to_encoder))
        to_head.update(self._decoded(**to_decoder, **more))
        logits, boxes = host.bbox_head(**to_head)
        return logits[-1], boxes[-1]

    def _decoded(self, **inputs: Any) -> dict[str, Any]:
        if not isinstance(self.host, DINO):
            return self.host.forward_decoder(**inputs)
        # DINO's own method asks for the length of the queries, which settles a graph's batch
        names = dict(memory='value', memory_mask='key_padding_mask', dn_mask='self_attn_mask')
        inputs = {names.get(key, key): value for key, value in inputs.items()}
        states, references = self.host.decoder(**inputs, reg_branches=self.host.bbox_head.reg_branches)
        return dict(hidden_states=states, references=list(references))


class AnchorNetwork(BoxNetwork):
    """RetinaNet, and whatever else has the plain head over anchors."""

    def __init__(self, host: nn.Module) -> None:
        super().__init__(host)
        head = type(host.bbox_head)
        own = [name for name in PREDICTIONS if getattr(head, name) is not getattr(AnchorHead, name, None)]
        if not isinstance(host.bbox_head, AnchorHead) or own:
            raise refuse(host, f'its {head.__name__} is no plain head over anchors')
        if host.bbox_head.test_cfg.get('min_bbox_size', -1) > 0:
            raise refuse(host, 'min_bbox_size is of the original image, whose size a graph does not know')

    def forward(self, images: Tensor, sizes: Tensor) -> tuple[Tensor, ...]:
        """Return boxes, scores and labels of images ``(B, 3, H, W)`` of ``sizes`` ``(B, 2)`` within the padding."""
        head = self.host.bbox_head
        maps = head(self.host.extract_feat(images))
        if len(maps) != 2:
            raise refuse(self.host, f'{type(head).__name__} weights its scores by a further map')
        found = candidates(head, maps[0], maps[1], sizes, head.test_cfg)
        return tuple(best(found, head.test_cfg.nms, head.test_cfg.max_per_img))  # a file knows no class of ours


PREDICTIONS = ('predict_by_feat', '_predict_by_feat_single', '_bbox_post_process')  # how a head makes boxes of its maps


class RoINetwork(BoxNetwork):
    """Faster and Mask R-CNN.

    A further output of the latter, ``masks`` ``(B, K, 28, 28)``, holds probabilities over each box, of its class; mmdet
    pastes them into images of the original size.
    """

    def __init__(self, host: nn.Module) -> None:
        super().__init__(host)
        roi_head = host.roi_head
        if type(roi_head) is not StandardRoIHead or roi_head.with_shared_head:
            raise refuse(host, f'of the RoI heads StandardRoIHead can be, not {type(roi_head).__name__}')
        for extractor in [roi_head.bbox_roi_extractor] + [roi_head.mask_roi_extractor] * roi_head.with_mask:
            if type(extractor) is not SingleRoIExtractor or not all(map(_averages, extractor.roi_layers)):
                raise refuse(host, 'of the RoI extractors SingleRoIExtractor with RoIAlign by the mean can be')
        if roi_head.with_mask:
            if not isinstance(roi_head.mask_head, FCNMaskHead):
                raise refuse(host, f'its {type(roi_head.mask_head).__name__} is no FCNMaskHead')
            self.outputs = (*Network.outputs, 'masks')  # type: ignore[misc]

    def classes(self) -> int:
        """Return the number of classes."""
        return self.host.roi_head.bbox_head.num_classes

    def settings(self) -> dict[str, Any]:
        """Return the proposals' and the RoIs'."""
        return dict(rpn=self.host.rpn_head.test_cfg, rcnn=self.host.roi_head.test_cfg)

    def forward(self, images: Tensor, sizes: Tensor) -> tuple[Tensor, ...]:
        """Return boxes, scores and labels, and masks, of images ``(B, 3, H, W)`` of ``sizes`` ``(B, 2)``."""
        host, roi_head = self.host, self.host.roi_head
        features = host.extract_feat(images)
        cfg = host.rpn_head.test_cfg
        scores, deltas = host.rpn_head(features)
        found = candidates(host.rpn_head, scores, deltas, sizes, cfg)
        proposals = best(found, cfg.nms, cfg.max_per_img)
        found = self._classified(features, proposals, sizes)
        cfg = roi_head.test_cfg
        boxes, scores, labels = best(found, cfg.nms, cfg.max_per_img)
        if not roi_head.with_mask:
            return boxes, scores, labels
        masks = roi_head.mask_head(self._align(roi_head.mask_roi_extractor, features, boxes)).sigmoid()
        if not roi_head.mask_head.class_agnostic:
            label = labels.clamp(min=0).flatten()[:, None, None, None]
            masks = masks.gather(1, label.expand(-1, 1, *masks.shape[-2:]))
        return boxes, scores, labels, masks.view(*scores.shape, *masks.shape[-2:])

    def _classified(self, features: Sequence[Tensor], proposals: Boxes, sizes: Tensor) -> Boxes:
        """Return a box of each proposal and class ``(B, P * C)``."""
        head, cfg = self.host.roi_head.bbox_head, self.host.roi_head.test_cfg
        aligned = self._align(self.host.roi_head.bbox_roi_extractor, features, proposals.boxes)
        logits, deltas = head(aligned)
        batch, count = proposals.scores.shape
        scores = logits.softmax(-1)[..., :-1].view(batch, count, -1)  # (B, P, C)
        classes = scores.shape[-1]
        own = 1 if head.reg_class_agnostic else classes
        boxes = proposals.boxes[:, :, None].expand(-1, -1, own, -1).reshape(batch, -1, 4)
        boxes = decode(head.bbox_coder, boxes, deltas.view(batch, -1, 4), sizes)
        boxes = boxes.view(batch, count, own, 4).expand(-1, -1, classes, -1)
        counts = (scores > cfg.score_thr) & (proposals.scores > 0)[..., None]
        labels = torch.arange(classes, device=scores.device).expand_as(scores)
        return Boxes(boxes.flatten(1, 2), torch.where(counts, scores, -1.0).flatten(1), labels.flatten(1))

    def _align(self, extractor: SingleRoIExtractor, features: Sequence[Tensor], boxes: Tensor) -> Tensor:
        """Return the features ``(B * N, C, h, w)`` of boxes ``(B, N, 4)``."""
        maps, layer = features[: extractor.num_inputs], extractor.roi_layers[0]
        batch, count = boxes.shape[:2]
        image = torch.arange(batch, device=boxes.device, dtype=boxes.dtype)[:, None, None].expand(-1, count, -1)
        rois = torch.cat([image, boxes], -1).flatten(0, 1)
        levels = extractor.map_roi_levels(rois, len(maps))
        height, width = layer.output_size
        options = Align(height, width, layer.sampling_ratio, layer.aligned)
        return pyramid_roi_align(maps, rois, levels, [each.spatial_scale for each in extractor.roi_layers], options)

    def _result(self, outputs: tuple[Tensor, ...], meta: dict[str, Any], rescale: bool) -> InstanceData:
        result = super()._result(outputs, meta, rescale=False)
        head = self.host.roi_head
        if head.with_mask:
            masks = outputs[3][outputs[1] > 0][:, None]
            if not head.mask_head.class_agnostic:  # mmdet picks the label's
                masks = masks.expand(-1, head.mask_head.num_classes, -1, -1)
            (result,) = head.mask_head.predict_by_feat(
                [masks], [result], [meta], rcnn_test_cfg=head.test_cfg, rescale=rescale, activate_map=True
            )  # it rescales the boxes, too
        elif rescale:
            result.bboxes /= result.bboxes.new_tensor(meta['scale_factor']).repeat(2)
        return result


class MaskNetwork(Network):
    """Mask2Former up to ``classes`` ``(B, Q, C + 1)`` and ``masks`` ``(B, Q, H, W)``, both logits.

    Instances and panoptic maps, of any number and in the size of the original, are made by the host's fusion head.
    """

    inputs = ('images',)
    outputs = ('classes', 'masks')

    def __init__(self, host: nn.Module) -> None:
        super().__init__(host)
        if not isinstance(host, Mask2Former):
            raise refuse(host, 'of the mask formers Mask2Former can be')

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return classes and masks of images ``(B, 3, H, W)``."""
        sample = SimpleNamespace(metainfo=dict(batch_input_shape=images.shape[-2:]))
        return self.host.panoptic_head.predict(self.host.extract_feat(images), [sample])

    def feeds(self, images: Tensor, samples: Sequence[BaseDataElement]) -> tuple[Tensor, ...]:
        """Return the images; the host masks no padding."""
        return (images,)

    def classes(self) -> int:
        """Return the number of classes, things and stuff."""
        return self.host.panoptic_head.num_classes

    def results(self, outputs: Sequence[Tensor], samples: Any, rescale: bool) -> Any:
        """Return the fusion head's results."""
        return self.host.panoptic_fusion_head.predict(*outputs, samples, rescale=rescale)


def _averages(layer: nn.Module) -> bool:
    return type(layer) is RoIAlign and layer.pool_mode == 'avg'


def detector(host: nn.Module) -> Network | None:
    """Return the network of a detector, None for what is none.

    Raises:
        ConfigError: A detector that cannot be exported.
    """
    networks: dict[type[nn.Module], type[Network]] = {
        DeformableDETR: QueryNetwork,
        MaskFormer: MaskNetwork,
        TwoStageDetector: RoINetwork,
        SingleStageDetector: AnchorNetwork,
    }
    found = [network for kind, network in networks.items() if isinstance(host, kind)]
    return found[0](host) if found else None
