"""Backend of deformable attention by mmcv's CUDA operator, which is registered with torch here.

mmcv is imported when a CUDA tensor asks for it, so that ``mmgate.ops`` needs torch alone.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .registered import sampling_operator


@functools.cache
def missing() -> str | None:
    """Return the reason why mmcv's CUDA operator cannot be used, or None if it can."""
    try:
        from mmcv.ops import get_compiling_cuda_version
    except ImportError as error:
        return f'mmcv with compiled operators is not installed ({error})'
    if get_compiling_cuda_version() == 'not available':
        return 'mmcv was built without CUDA; build it where torch.version.cuda is set and nvcc is found'
    return None


def why_not(value: Tensor) -> str | None:
    """Return the reason why this backend cannot run on ``value``, or None if it can."""
    if value.device.type != 'cuda':
        return f'it is for CUDA tensors, value is on {value.device}'
    if torch.are_deterministic_algorithms_enabled():
        return 'it adds up the gradients of the values in no fixed order, and torch.use_deterministic_algorithms is on'
    if value.dtype == torch.float64:
        return 'it is checked for float16, bfloat16 and float32 only, value is float64'
    return missing()


def sample(
    value: Tensor, spatial_shapes: Tensor, level_start_index: Tensor, sampling_locations: Tensor, weights: Tensor
) -> Tensor:
    """Sample the values and sum them by weights with mmcv's CUDA kernel, like :func:`.reference.sample`.

    It is computed in float32 for every input dtype: mmcv's kernel has no bfloat16, and in float16 it rounds the
    coordinates.
    """
    output = _operator(
        value.float().contiguous(),
        spatial_shapes,
        level_start_index,
        sampling_locations.float().contiguous(),
        weights.float().contiguous(),
    )
    return output.to(value.dtype)


def _sample(
    value: Tensor, spatial_shapes: Tensor, level_start_index: Tensor, locations: Tensor, weights: Tensor
) -> Tensor:
    from mmcv.ops.multi_scale_deform_attn import ext_module

    # The kernel wants a batch that its step divides; one step for all images always does.
    return ext_module.ms_deform_attn_forward(
        value, spatial_shapes, level_start_index, locations, weights, im2col_step=len(value)
    )


def _sample_backward(
    grad: Tensor,
    value: Tensor,
    spatial_shapes: Tensor,
    level_start_index: Tensor,
    locations: Tensor,
    weights: Tensor,
    value_needs_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of values, locations and weights by mmcv's kernel, which computes all three together."""
    from mmcv.ops.multi_scale_deform_attn import ext_module

    grad_value = torch.zeros_like(value)
    grad_locations = torch.zeros_like(locations)
    grad_weights = torch.zeros_like(weights)
    ext_module.ms_deform_attn_backward(
        value,
        spatial_shapes,
        level_start_index,
        locations,
        weights,
        grad.contiguous(),
        grad_value,
        grad_locations,
        grad_weights,
        im2col_step=len(value),
    )
    return grad_value, grad_locations, grad_weights


_operator = sampling_operator('ms_deform_sample_mmcv', _sample, _sample_backward)
