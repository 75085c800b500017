"""mmcv's operator of deformable sampling, compiled alone, under mmcv's names; ``mmcv_cuda.py`` copies this file."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

torch.ops.load_library(str(Path(__file__).with_name('operator.so')))


def forward(
    value: Tensor, shapes: Tensor, starts: Tensor, locations: Tensor, weights: Tensor, im2col_step: int
) -> Tensor:
    """Return the weighted samples ``(B, Q, H * D)``."""
    return torch.ops.mmcv_alone.forward(value, shapes, starts, locations, weights, im2col_step)


def backward(
    value: Tensor,
    shapes: Tensor,
    starts: Tensor,
    locations: Tensor,
    weights: Tensor,
    grad: Tensor,
    grad_value: Tensor,
    grad_locations: Tensor,
    grad_weights: Tensor,
    im2col_step: int,
) -> None:
    """Add the gradients of values, locations and weights to the last three tensors."""
    inputs = (value, shapes, starts, locations, weights, grad)
    torch.ops.mmcv_alone.backward(*inputs, grad_value, grad_locations, grad_weights, im2col_step)


ext_module = SimpleNamespace(ms_deform_attn_forward=forward, ms_deform_attn_backward=backward)


class MultiScaleDeformableAttnFunction(torch.autograd.Function):
    """The operator with its gradient, as mmcv's layers call it."""

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, shapes: Tensor, starts: Tensor, locations: Tensor, weights: Tensor, im2col_step: int
    ) -> Tensor:
        """Return the weighted samples ``(B, Q, H * D)``; locations and weights get the values' dtype, as in mmcv."""
        inputs = (value, shapes, starts, locations.type_as(value), weights.type_as(value))
        ctx.save_for_backward(*inputs)
        ctx.im2col_step = im2col_step
        return forward(*inputs, im2col_step)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of values, locations and weights."""
        inputs = ctx.saved_tensors
        value, locations, weights = (torch.zeros_like(inputs[place]) for place in (0, 3, 4))
        backward(*inputs, grad.contiguous(), value, locations, weights, ctx.im2col_step)
        return value, None, None, locations, weights, None
