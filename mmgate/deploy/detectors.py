"""Networks to export for mmdet's detectors, which return boxes, scores, labels and the boxes' masks as tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from mmdet.models.dense_heads import AnchorHead
from mmdet.models.detectors import DINO, DeformableDETR, Mask2Former, SingleStageDetector, TwoStageDetector
from mmdet.models.roi_heads import StandardRoIHead
from mmdet.models.roi_heads.roi_extractors import SingleRoIExtractor
from mmdet.structures.bbox import bbox_cxcywh_to_xyxy
from mmengine.structures import InstanceData
from torch import Tensor, nn

from .boxes import Boxes, candidates, clip_boxes, decode, non_maximum_suppression
from .network import Network, Samples, not_exportable
from .operators import roi_align


class BoxNetwork(Network):
    """Base of the networks that return boxes, with their scores and labels.

    Outputs: ``boxes`` ``(B, K, 4)`` as (x1, y1, x2, y2) in pixels of the input, ``scores`` ``(B, K)``, best first, -1
    where there is no box, and ``labels`` ``(B, K)``, int64; K is the config's ``max_per_img``.
    """

    def results(self, outputs: Sequence[Tensor], samples: Samples, rescale: bool) -> list[InstanceData]:
        """Turn the network's outputs into mmdet's results: boxes and, if the network has them, masks of each image."""
        images = zip(*outputs, strict=True)
        return [self._result(parts, sample.metainfo, rescale) for parts, sample in zip(images, samples, strict=True)]

    def _result(self, outputs: tuple[Tensor, ...], meta: dict[str, Any], rescale: bool) -> InstanceData:
        """Turn the outputs for one image into mmdet's result, with boxes in pixels of the original if ``rescale``."""
        boxes, scores, labels = (output[outputs[1] > 0] for output in outputs[:3])
        if rescale:
            boxes = boxes / boxes.new_tensor(meta['scale_factor']).repeat(2)
        return InstanceData(bboxes=boxes, scores=scores, labels=labels)


class QueryNetwork(BoxNetwork):
    """Network to export for Deformable DETR and DINO; padding is masked as in mmdet."""

    def forward(self, images: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return boxes, scores and labels for padded images ``(B, 3, H, W)``, whose unpadded sizes are ``(B, 2)``."""
        logits, boxes = self._queries(images, sizes)
        head = self.model.bbox_head
        scores, index = logits.sigmoid().flatten(1).topk(head.test_cfg.get('max_per_img', boxes.shape[1]))
        labels = index % head.num_classes
        place = index // head.num_classes
        boxes = bbox_cxcywh_to_xyxy(boxes.gather(1, place[..., None].expand(-1, -1, 4)))
        boxes = boxes * sizes.flip(-1).repeat(1, 2)[:, None].to(boxes.dtype)
        return clip_boxes(boxes, sizes), scores, labels

    def _queries(self, images: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
        """Return for each query its logits ``(B, Q, C)`` and its box ``(B, Q, 4)`` as (centre, size) from 0 to 1.

        Boxes are relative to the image without padding.
        """
        model = self.model
        size = images.shape[-2:]
        features = model.extract_feat(images)
        # mmdet loops over the images to mask padding. Here it sees images without padding; the masks are made below.
        whole = SimpleNamespace(batch_input_shape=size, img_shape=size)
        to_encoder, to_decoder = model.pre_transformer(features, [whole] * 2)
        rows, columns = (torch.arange(n, device=images.device) for n in size)
        padding = (rows[:, None] >= sizes[:, :1, None]) | (columns >= sizes[:, 1:, None])  # (B, H, W)
        padding = padding[:, None].to(images.dtype)
        masks = [F.interpolate(padding, size=feature.shape[-2:])[:, 0] > 0.5 for feature in features]
        positions = []
        for mask, level in zip(masks, model.level_embed, strict=True):
            encoding = model.positional_encoding(mask).flatten(2)
            positions.append((encoding + level[:, None]).transpose(1, 2))
        mask = torch.cat([mask.flatten(1) for mask in masks], 1)
        ratios = torch.stack([model.get_valid_ratio(mask) for mask in masks], 1)
        to_encoder.update(feat_mask=mask, feat_pos=torch.cat(positions, 1), valid_ratios=ratios)
        to_decoder.update(memory_mask=mask, valid_ratios=ratios)
        more, to_head = model.pre_decoder(**model.forward_encoder(**to_encoder))
        to_head.update(self._decoded(**to_decoder, **more))
        logits, boxes = model.bbox_head(**to_head)
        return logits[-1], boxes[-1]

    def _decoded(self, **inputs: Any) -> dict[str, Any]:
        """Run the decoder on the arguments of the detector's ``forward_decoder``; return its states and references."""
        if not isinstance(self.model, DINO):
            return self.model.forward_decoder(**inputs)
        # DINO's own method takes the length of the queries, which would fix the batch of the graph.
        names = dict(memory='value', memory_mask='key_padding_mask', dn_mask='self_attn_mask')
        inputs = {names.get(key, key): value for key, value in inputs.items()}
        states, references = self.model.decoder(**inputs, reg_branches=self.model.bbox_head.reg_branches)
        return dict(hidden_states=states, references=list(references))


class AnchorNetwork(BoxNetwork):
    """Network to export for RetinaNet and other one-stage detectors with mmdet's plain AnchorHead."""

    def forward(self, images: Tensor, sizes: Tensor) -> tuple[Tensor, ...]:
        """Return boxes, scores and labels for padded images ``(B, 3, H, W)``, whose unpadded sizes are ``(B, 2)``."""
        head = self.model.bbox_head
        scores, deltas, *more = head(self.model.extract_feat(images))
        cfg = head.test_cfg
        # min_bbox_size is in pixels of the original image, whose size the graph does not know.
        if more or cfg.get('min_bbox_size', -1) > 0:
            reason = f'its {type(head).__name__} weights scores by another map, or has a min_bbox_size'
            raise not_exportable(self.model, reason)
        found = candidates(head, scores, deltas, sizes, cfg)
        # A file returns plain tuples only.
        return tuple(non_maximum_suppression(found, cfg.nms, cfg.max_per_img))


class RoINetwork(BoxNetwork):
    """Network to export for Faster R-CNN and Mask R-CNN.

    Mask R-CNN's output ``masks`` ``(B, K, 28, 28)`` holds the probabilities of each box's class over the box; mmdet
    pastes them into images of the original size.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        if self.model.roi_head.with_mask:
            self.outputs = (*Network.outputs, 'masks')  # type: ignore[misc]

    def forward(self, images: Tensor, sizes: Tensor) -> tuple[Tensor, ...]:
        """Return boxes, scores, labels and (Mask R-CNN) masks for padded images ``(B, 3, H, W)``.

        Their sizes without padding are ``sizes`` ``(B, 2)``.
        """
        model = self.model
        roi_head = model.roi_head
        features = model.extract_feat(images)
        cfg = model.rpn_head.test_cfg
        scores, deltas = model.rpn_head(features)
        found = candidates(model.rpn_head, scores, deltas, sizes, cfg)
        proposals = non_maximum_suppression(found, cfg.nms, cfg.max_per_img)
        cfg = roi_head.test_cfg
        found = self._classified(features, proposals, sizes)
        boxes, scores, labels = non_maximum_suppression(found, cfg.nms, cfg.max_per_img)
        if not roi_head.with_mask:
            return boxes, scores, labels
        masks = roi_head.mask_head(self._align(roi_head.mask_roi_extractor, features, boxes)).sigmoid()
        if not roi_head.mask_head.class_agnostic:
            label = labels.clamp(min=0).flatten()[:, None, None, None]
            masks = masks.gather(1, label.expand(-1, 1, *masks.shape[-2:]))
        return boxes, scores, labels, masks.view(*scores.shape, *masks.shape[-2:])

    def _classified(self, features: Sequence[Tensor], proposals: Boxes, sizes: Tensor) -> Boxes:
        """Classify P proposals; return a box and a score for each pair of proposal and class, ``(B, P * C)``."""
        head = self.model.roi_head.bbox_head
        cfg = self.model.roi_head.test_cfg
        aligned = self._align(self.model.roi_head.bbox_roi_extractor, features, proposals.boxes)
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
        """Pool the features inside boxes ``(B, N, 4)``, each from the level of its size, to ``(B * N, C, h, w)``."""
        maps = features[: extractor.num_inputs]
        image = torch.arange(boxes.shape[0], device=boxes.device, dtype=boxes.dtype)[:, None, None]
        rois = torch.cat([image.expand(-1, boxes.shape[1], -1), boxes], -1).flatten(0, 1)  # (B * N, 5)
        levels = extractor.map_roi_levels(rois, len(maps))
        sized = (rois[:, 3:] > rois[:, 1:3]).all(1)
        found = []
        for level, (map_, layer) in enumerate(zip(maps, extractor.roi_layers, strict=True)):
            here = levels == level
            # RoIs of other levels get no size, so that they have no points and cost nothing.
            within = torch.cat([rois[:, :1], rois[:, 1:] * here[:, None].to(rois.dtype)], 1)
            options = (*layer.output_size, layer.spatial_scale, layer.sampling_ratio, layer.aligned)
            pooled = roi_align(map_, within, *options)
            # The mean over no points is 0 in mmcv and ONNX Runtime, and NaN in OpenVINO, which times 0 stays NaN.
            filled = here & sized if layer.aligned else here
            found.append(torch.where(filled[:, None, None, None], pooled, 0.0))
        return torch.stack(found).sum(0)

    def _result(self, outputs: tuple[Tensor, ...], meta: dict[str, Any], rescale: bool) -> InstanceData:
        head = self.model.roi_head
        result = super()._result(outputs, meta, rescale and not head.with_mask)
        if head.with_mask:
            masks = outputs[3][outputs[1] > 0][:, None]
            # mmdet selects the mask of the label among all classes.
            if not head.mask_head.class_agnostic:
                masks = masks.expand(-1, head.mask_head.num_classes, -1, -1)
            # This rescales the boxes, too.
            (result,) = head.mask_head.predict_by_feat(
                [masks], [result], [meta], rcnn_test_cfg=head.test_cfg, rescale=rescale, activate_map=True
            )
        return result


class MaskNetwork(Network):
    """Network to export for mmdet's Mask2Former: class logits ``(B, Q, C + 1)`` and mask logits ``(B, Q, H, W)``.

    The model's fusion head makes instances and panoptic maps of them, in the size of the original image.
    """

    inputs = ('images',)
    outputs = ('classes', 'masks')

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return class and mask logits of all queries for images ``(B, 3, H, W)``."""
        sample = SimpleNamespace(metainfo=dict(batch_input_shape=images.shape[-2:]))
        return self.model.panoptic_head.predict(self.model.extract_feat(images), [sample])

    def results(self, outputs: Sequence[Tensor], samples: Samples, rescale: bool) -> Any:
        """Turn the network's logits into mmdet's results with the detector's own fusion head."""
        return self.model.panoptic_fusion_head.predict(*outputs, samples, rescale=rescale)


def _plain_anchors(model: Any) -> bool:
    """Return True if a one-stage detector's head makes boxes as mmdet's AnchorHead does."""
    head = getattr(model, 'bbox_head', None)
    names = ('predict_by_feat', '_predict_by_feat_single', '_bbox_post_process')
    return isinstance(head, AnchorHead) and all(getattr(type(head), n) is getattr(AnchorHead, n) for n in names)


def _plain_rois(model: Any) -> bool:
    """Return True if a two-stage detector has mmdet's standard RoI head, which averages in one level for each box."""
    head = model.roi_head
    if type(head) is not StandardRoIHead or head.with_shared_head:
        return False
    extractors = [head.bbox_roi_extractor] + [head.mask_roi_extractor] * head.with_mask
    kinds = [(type(one), getattr(one.roi_layers[0], 'pool_mode', None)) for one in extractors]
    return all(kind == (SingleRoIExtractor, 'avg') for kind in kinds)


# Class of models, their network, and a function that returns True for those that the network fits.
NETWORKS: tuple[tuple[type[nn.Module], type[Network], Callable[[nn.Module], bool]], ...] = (
    (DeformableDETR, QueryNetwork, lambda model: type(model) in (DeformableDETR, DINO)),
    (Mask2Former, MaskNetwork, lambda model: True),
    (TwoStageDetector, RoINetwork, _plain_rois),
    (SingleStageDetector, AnchorNetwork, _plain_anchors),
)


def detector(model: nn.Module) -> Network | None:
    """Return the network to export for a detector of mmdet, or None if there is none for its class."""
    for cls, network, fits in NETWORKS:
        if isinstance(model, cls) and fits(model):
            return network(model)
    return None
