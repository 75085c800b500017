"""The functions of ``mmcv._ext`` by mmcv's names and arguments: most fill tensors that mmcv has made.

Buffers for a kernel's use (``columns``, ``ones``, ``buff``, ``argmax_y``) are left as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import torch
from torch import Tensor

from mmgate.ops import ms_deform_attn

from .boxes import nms, soft_nms
from .deform_conv import deform_conv, gradients
from .focal_loss import sigmoid_focal_loss, sigmoid_focal_loss_gradient, softmax_focal_loss, softmax_focal_loss_gradient
from .roi_align import roi_align, roi_align_gradient

__all__ = [
    'deform_conv_backward_input',
    'deform_conv_backward_parameters',
    'deform_conv_forward',
    'get_compiler_version',
    'get_compiling_cuda_version',
    'modulated_deform_conv_backward',
    'modulated_deform_conv_forward',
    'ms_deform_attn_backward',
    'ms_deform_attn_forward',
    'nms',
    'roi_align_backward',
    'roi_align_forward',
    'sigmoid_focal_loss_backward',
    'sigmoid_focal_loss_forward',
    'softmax_focal_loss_backward',
    'softmax_focal_loss_forward',
    'softnms',
]


def not_compiled(name: str) -> Callable[..., NoReturn]:
    """Return a function that raises: mmcv looks all its operators up at import, and calls few of them.

    Raises:
        AttributeError: ``name`` is one of Python's own, which a module may be asked for.
    """
    if name.startswith('__'):
        raise AttributeError(f"module 'mmcv._ext' has no attribute {name!r}")

    def fail(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(
            f'{name}: mmcv was installed without its compiled operators, and this one is not among those that mmgate '
            'computes in torch. Compile mmcv for your torch: docs/install.md, "With compiled operators".'
        )

    return fail


def get_compiler_version() -> str:
    """Return the compiler of mmcv's operators, for mmengine's list of the environment."""
    return 'none (mmgate.mmcv_ext)'


def get_compiling_cuda_version() -> str:
    """Return mmcv's words for operators without CUDA."""
    return 'not available'


def softnms(
    boxes: Tensor,
    scores: Tensor,
    dets: Tensor,
    iou_threshold: float,
    sigma: float,
    min_score: float,
    method: int,
    offset: int,
) -> Tensor:
    """Write the boxes that soft NMS keeps, and their new scores, into ``dets`` and return their indices."""
    kept, indices = soft_nms(boxes, scores, iou_threshold, sigma, min_score, method, offset)
    dets[: len(kept)] = kept
    return indices


def roi_align_forward(
    input: Tensor,
    rois: Tensor,
    output: Tensor,
    argmax_y: Tensor,
    argmax_x: Tensor,
    aligned_height: int,
    aligned_width: int,
    spatial_scale: float,
    sampling_ratio: int,
    pool_mode: int,
    aligned: bool,
) -> None:
    """Fill ``output``."""
    _only_averages(pool_mode)
    size = (aligned_height, aligned_width)
    output.copy_(roi_align(input, rois, size, spatial_scale, sampling_ratio, aligned))


def roi_align_backward(
    grad_output: Tensor,
    rois: Tensor,
    argmax_y: Tensor,
    argmax_x: Tensor,
    grad_input: Tensor,
    aligned_height: int,
    aligned_width: int,
    spatial_scale: float,
    sampling_ratio: int,
    pool_mode: int,
    aligned: bool,
) -> None:
    """Fill ``grad_input``."""
    _only_averages(pool_mode)
    grad_input.copy_(roi_align_gradient(grad_output, rois, grad_input.shape, spatial_scale, sampling_ratio, aligned))


def _only_averages(pool_mode: int) -> None:
    if pool_mode == 0:
        not_compiled("roi_align with pool_mode='max'")()


def sigmoid_focal_loss_forward(
    input: Tensor, target: Tensor, weight: Tensor, output: Tensor, gamma: float, alpha: float
) -> None:
    """Fill ``output``."""
    output.copy_(sigmoid_focal_loss(input, target, weight, gamma, alpha))


def sigmoid_focal_loss_backward(
    input: Tensor, target: Tensor, weight: Tensor, grad_input: Tensor, gamma: float, alpha: float
) -> None:
    """Fill ``grad_input``."""
    grad_input.copy_(sigmoid_focal_loss_gradient(input, target, weight, gamma, alpha))


def softmax_focal_loss_forward(
    input: Tensor, target: Tensor, weight: Tensor, output: Tensor, gamma: float, alpha: float
) -> None:
    """Fill ``output``."""
    output.copy_(softmax_focal_loss(input, target, weight, gamma, alpha))


def softmax_focal_loss_backward(
    input: Tensor, target: Tensor, weight: Tensor, buff: Tensor, grad_input: Tensor, gamma: float, alpha: float
) -> None:
    """Fill ``grad_input``."""
    grad_input.copy_(softmax_focal_loss_gradient(input, target, weight, gamma, alpha))


def modulated_deform_conv_forward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    ones: Tensor,
    offset: Tensor,
    mask: Tensor,
    output: Tensor,
    columns: Tensor,
    kernel_h: int,
    kernel_w: int,
    stride_h: int,
    stride_w: int,
    pad_h: int,
    pad_w: int,
    dilation_h: int,
    dilation_w: int,
    group: int,
    deformable_group: int,
    with_bias: bool,
) -> None:
    """Fill ``output``."""
    steps = (stride_h, stride_w), (pad_h, pad_w), (dilation_h, dilation_w)
    output.copy_(deform_conv(input, offset, mask, weight, bias if with_bias else None, *steps))


def modulated_deform_conv_backward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    ones: Tensor,
    offset: Tensor,
    mask: Tensor,
    columns: Tensor,
    grad_input: Tensor,
    grad_weight: Tensor,
    grad_bias: Tensor,
    grad_offset: Tensor,
    grad_mask: Tensor,
    grad_output: Tensor,
    kernel_h: int,
    kernel_w: int,
    stride_h: int,
    stride_w: int,
    pad_h: int,
    pad_w: int,
    dilation_h: int,
    dilation_w: int,
    group: int,
    deformable_group: int,
    with_bias: bool,
) -> None:
    """Fill the five gradients."""
    steps = (stride_h, stride_w), (pad_h, pad_w), (dilation_h, dilation_w)
    filled = [grad_input, grad_offset, grad_mask, grad_weight]
    for grad, found in zip(filled, gradients(grad_output, (input, offset, mask, weight), *steps), strict=True):
        grad.copy_(found)
    if with_bias:
        grad_bias.copy_(grad_output.sum((0, 2, 3)))


def deform_conv_forward(
    input: Tensor,
    weight: Tensor,
    offset: Tensor,
    output: Tensor,
    columns: Tensor,
    ones: Tensor,
    kW: int,
    kH: int,
    dW: int,
    dH: int,
    padW: int,
    padH: int,
    dilationW: int,
    dilationH: int,
    group: int,
    deformable_group: int,
    im2col_step: int,
) -> None:
    """Fill ``output``."""
    steps = (dH, dW), (padH, padW), (dilationH, dilationW)
    output.copy_(deform_conv(input, offset, None, weight, None, *steps))


def deform_conv_backward_input(
    input: Tensor,
    offset: Tensor,
    gradOutput: Tensor,
    gradInput: Tensor,
    gradOffset: Tensor,
    weight: Tensor,
    columns: Tensor,
    kW: int,
    kH: int,
    dW: int,
    dH: int,
    padW: int,
    padH: int,
    dilationW: int,
    dilationH: int,
    group: int,
    deformable_group: int,
    im2col_step: int,
) -> None:
    """Fill ``gradInput`` and ``gradOffset``."""
    steps = (dH, dW), (padH, padW), (dilationH, dilationW)
    found = gradients(gradOutput, (input, offset, None, weight), *steps, of=(0, 1))
    gradInput.copy_(found[0])
    gradOffset.copy_(found[1])


def deform_conv_backward_parameters(
    input: Tensor,
    offset: Tensor,
    gradOutput: Tensor,
    gradWeight: Tensor,
    columns: Tensor,
    ones: Tensor,
    kW: int,
    kH: int,
    dW: int,
    dH: int,
    padW: int,
    padH: int,
    dilationW: int,
    dilationH: int,
    group: int,
    deformable_group: int,
    scale: float,
    im2col_step: int,
) -> None:
    """Add ``scale`` times the gradient to ``gradWeight``."""
    steps = (dH, dW), (padH, padW), (dilationH, dilationW)
    # The gradient does not depend on the weight's values.
    found = gradients(gradOutput, (input, offset, None, torch.zeros_like(gradWeight)), *steps, of=(3,))
    gradWeight.add_(found[0], alpha=scale)


def ms_deform_attn_forward(
    value: Tensor,
    value_spatial_shapes: Tensor,
    value_level_start_index: Tensor,
    sampling_locations: Tensor,
    attention_weights: Tensor,
    im2col_step: int,
) -> Tensor:
    """Return ``(B, Q, H * D)`` by :func:`mmgate.ops.ms_deform_attn`."""
    return _attend(value, value_spatial_shapes, value_level_start_index, sampling_locations, attention_weights)


def ms_deform_attn_backward(
    value: Tensor,
    value_spatial_shapes: Tensor,
    value_level_start_index: Tensor,
    sampling_locations: Tensor,
    attention_weights: Tensor,
    grad_output: Tensor,
    grad_value: Tensor,
    grad_sampling_loc: Tensor,
    grad_attn_weight: Tensor,
    im2col_step: int,
) -> None:
    """Fill the three gradients."""
    inputs = [x.detach().requires_grad_() for x in (value, sampling_locations, attention_weights)]
    with torch.enable_grad():
        output = _attend(inputs[0], value_spatial_shapes, value_level_start_index, *inputs[1:])
    found = torch.autograd.grad(output, inputs, grad_output)
    for grad, value_of in zip((grad_value, grad_sampling_loc, grad_attn_weight), found, strict=True):
        grad.copy_(value_of)


def _attend(value: Tensor, shapes: Tensor, starts: Tensor, locations: Tensor, weights: Tensor) -> Tensor:
    # softmax(0) F is F / N over the N points of a head, so that F = N times the weights leaves the weights given.
    points = weights.shape[-2:].numel()
    return ms_deform_attn(
        value,
        shapes,
        starts,
        locations,
        torch.zeros_like(weights),
        weights * points,
        residual=False,
        position='post_softmax',
    )
