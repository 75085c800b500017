"""The ONNX operators of opset 18 that stand for ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import nms  # noqa: F401  (it registers what is translated)

OPSET = 18
BOOL, INT64 = 9, 7  # onnx.TensorProto's


def translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Return the translation table of ``torch.onnx.export``."""
    from onnxscript.onnx_opset import opset18
    from onnxscript.onnx_types import FLOAT

    op: Any = opset18  # its methods are typed for tensors alone, and take numbers

    def nms_keep(boxes: FLOAT, scores: FLOAT, iou_threshold: float) -> Any:
        every, threshold = op.Constant(value_int=2**31 - 1), op.Constant(value_float=iou_threshold)
        # (M, 3) as (image, class, box), of scores above the last argument
        chosen = op.NonMaxSuppression(boxes, op.Unsqueeze(scores, [1]), every, threshold, op.Constant(value_float=0.0))
        places = op.Gather(chosen, op.Constant(value_ints=[0, 2]), axis=1)  # (M, 2)
        ones = op.Squeeze(op.Add(op.Mul(op.Slice(places, [0], [1], [1]), 0), 1), [1])  # (M,)
        nothing = op.Cast(op.Mul(scores, 0.0), to=INT64)
        return op.Cast(op.ScatterND(nothing, places, ones), to=BOOL)

    return {torch.ops.mmgate.nms_keep.default: nms_keep}
