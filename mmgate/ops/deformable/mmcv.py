"""Backend of deformable attention by mmcv's CUDA operator, which is registered with torch here.

mmcv is imported when a CUDA tensor asks for it, so that ``mmgate.ops`` needs torch alone.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ..backend import operator
from .samples import Samples, padded_levels, weighted

TENSORS = 'Tensor value, Tensor spatial_shapes, Tensor level_start_index, Tensor locations, Tensor weights'


@functools.cache
def why_unavailable() -> str | None:
    """Return the reason why mmcv's CUDA operator cannot be used, or None if it can."""
    try:
        from mmcv.ops import get_compiling_cuda_version
    except ImportError as error:
        return f'mmcv with compiled operators is not installed ({error})'
    if get_compiling_cuda_version() == 'not available':
        return 'mmcv was built without CUDA; build it where torch.version.cuda is set and nvcc is found'
    return None


def why_not_mmcv(value: Tensor) -> str | None:
    """Return the reason why this backend cannot run on ``value``, or None if it can."""
    if value.device.type != 'cuda':
        return f'it is for CUDA tensors, value is on {value.device}'
    if torch.are_deterministic_algorithms_enabled():
        return 'it adds up the gradients of the values in no fixed order, and torch.use_deterministic_algorithms is on'
    if value.dtype == torch.float64:
        return 'it is checked for float16, bfloat16 and float32 only, value is float64'
    return why_unavailable()


def attend(samples: Samples) -> Tensor:
    """Compute deformable attention by mmcv's CUDA kernel, which samples and sums: ``(B, Q, H * D)``.

    It is computed in float32 for every input dtype: mmcv's kernel has no bfloat16, and in float16 it rounds the
    coordinates.
    """
    value, spatial_shapes, level_start_index, locations, weights, _ = padded_levels(weighted(samples))
    output = _operator(
        value.float().contiguous(),
        spatial_shapes,
        level_start_index,
        locations.float().contiguous(),
        weights.float().contiguous(),
    )
    return output.to(value.dtype)


def _empty_output(value: Tensor, *others: Tensor) -> Tensor:
    weights = others[-1]
    return value.new_empty(*weights.shape[:2], value.shape[2] * value.shape[3])


@operator('ms_deform_sample_mmcv', _empty_output, f'({TENSORS}) -> Tensor')
def _operator(*tensors: Tensor) -> Tensor:
    """Sample and sum; the arguments are the tensors of :class:`.samples.WeightedSamples`."""
    from mmcv.ops.multi_scale_deform_attn import ext_module

    # The kernel wants a batch that its step divides; one step for all images always does.
    return ext_module.ms_deform_attn_forward(*tensors, im2col_step=len(tensors[0]))


def _empty_gradients(grad: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    value, _, _, locations, weights = tensors
    return value.new_empty(value.shape), locations.new_empty(locations.shape), weights.new_empty(weights.shape)


@operator('ms_deform_sample_mmcv_backward', _empty_gradients, f'(Tensor grad, {TENSORS}) -> (Tensor, Tensor, Tensor)')
def _gradients(grad: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of values, locations and weights, which mmcv's kernel computes together."""
    from mmcv.ops.multi_scale_deform_attn import ext_module

    value, _, _, locations, weights = tensors
    gradients = (torch.zeros_like(value), torch.zeros_like(locations), torch.zeros_like(weights))
    ext_module.ms_deform_attn_backward(*tensors, grad.contiguous(), *gradients, im2col_step=len(value))
    return gradients


def _setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    of_value, of_locations, of_weights = _gradients(grad, *ctx.saved_tensors)
    return of_value, None, None, of_locations, of_weights


_operator.differentiate(_backward, _setup_context)
