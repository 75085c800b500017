"""Custom torch operators for non-maximum suppression and RoIAlign, which ONNX files get as standard nodes.

In PyTorch they run mmcv's code.

Layout: boxes (B, N, 4) as (x1, y1, x2, y2); scores (B, N), above 0 for candidates; RoIs (R, 5) as (image, x1, y1, x2,
y2) in pixels of the image.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mmcv.ops
import torch
from torch import Tensor

from mmgate.ops.backend import operator

# Numbers of dtypes in onnx.TensorProto.
BOOL = 9
INT64 = 7


@operator('nms_keep', fake=lambda boxes, scores, *_: torch.empty_like(scores, dtype=torch.bool))
def nms_keep(boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """Return a mask ``(B, N)`` of the boxes to keep: those that overlap no better one by more than the threshold."""
    kept = torch.zeros_like(scores, dtype=torch.bool)
    for image in range(len(boxes)):
        there = (scores[image] > 0).nonzero().flatten()
        _, chosen = mmcv.ops.nms(boxes[image, there], scores[image, there], iou_threshold)
        kept[image, there[chosen]] = True
    return kept


@operator('roi_align', fake=lambda map_, rois, h, w, *_: map_.new_empty(rois.shape[0], map_.shape[1], h, w))
def roi_align(
    map_: Tensor, rois: Tensor, height: int, width: int, scale: float, sampling_ratio: int, aligned: bool
) -> Tensor:
    """Pool a map's features ``(B, C, H, W)`` inside boxes to ``(R, C, height, width)``, as mmcv's RoIAlign does."""
    return mmcv.ops.roi_align(map_, rois, (height, width), scale, sampling_ratio, 'avg', aligned)


def translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Return the functions with which ``torch.onnx.export`` writes the two operators as ONNX nodes."""
    from onnxscript.onnx_opset import opset18

    # Its methods take numbers, although they are typed for tensors only.
    op: Any = opset18

    def write_nms(boxes: Any, scores: Any, iou_threshold: float) -> Any:
        every = op.Constant(value_int=2**31 - 1)
        threshold = op.Constant(value_float=iou_threshold)
        # The rows (M, 3) are (image, class, box). The last argument is the least score.
        chosen = op.NonMaxSuppression(boxes, op.Unsqueeze(scores, [1]), every, threshold, op.Constant(value_float=0.0))
        places = op.Gather(chosen, op.Constant(value_ints=[0, 2]), axis=1)  # (M, 2)
        ones = op.Squeeze(op.Add(op.Mul(op.Slice(places, [0], [1], [1]), 0), 1), [1])  # (M,)
        nothing = op.Cast(op.Mul(scores, 0.0), to=INT64)
        return op.Cast(op.ScatterND(nothing, places, ones), to=BOOL)

    def write_roi_align(
        map_: Any, rois: Any, height: int, width: int, scale: float, sampling_ratio: int, aligned: bool
    ) -> Any:
        boxes = op.Slice(rois, [1], [5], [1])
        image = op.Squeeze(op.Slice(rois, [0], [1], [1]), [1])
        return op.RoiAlign(
            map_,
            boxes,
            op.Cast(image, to=INT64),
            coordinate_transformation_mode='half_pixel' if aligned else 'output_half_pixel',
            output_height=height,
            output_width=width,
            sampling_ratio=sampling_ratio,
            spatial_scale=scale,
        )

    return {torch.ops.mmgate.nms_keep.default: write_nms, torch.ops.mmgate.roi_align.default: write_roi_align}
