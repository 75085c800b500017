"""Multi-scale deformable sampling by mmcv's CUDA operator, as one registered torch op.

The import of mmcv is put off until a CUDA tensor asks for it, so that ``mmgate.ops`` needs torch alone.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ..library import operator


@functools.cache
def _missing() -> str | None:
    try:
        from mmcv.ops import get_compiling_cuda_version, multi_scale_deform_attn
    except ImportError as error:
        return f'mmcv with compiled operators is not installed ({error})'
    own = multi_scale_deform_attn.ext_module.__name__ == 'mmcv._ext'  # a benchmark may have put another there
    if own and get_compiling_cuda_version() == 'not available':
        return 'mmcv was built without CUDA; build it where torch.version.cuda is set and nvcc is found'
    return None


def look_again() -> None:
    """Ask mmcv anew at the next call, for code that has given it the operator."""
    _missing.cache_clear()


def why_not(value: Tensor) -> str | None:
    """Return why this backend cannot run on ``value``, or None."""
    if value.device.type != 'cuda':
        return f'it is for CUDA tensors, value is on {value.device}'
    if value.dtype == torch.float64:
        return 'it is checked for float16, bfloat16 and float32 only, value is float64'
    return _missing()


def sample(
    value: Tensor, spatial_shapes: Tensor, level_start_index: Tensor, sampling_locations: Tensor, weights: Tensor
) -> Tensor:
    """Weighted sampling, as :func:`mmgate.ops.ms_deform_attn.reference.sample`.

    Computed in float32 for every input dtype: mmcv's kernel has no bfloat16, and in float16 it rounds the coordinates.
    """
    output = _sample(
        value.float().contiguous(),
        spatial_shapes,
        level_start_index,
        sampling_locations.float().contiguous(),
        weights.float().contiguous(),
    )
    return output.to(value.dtype)


def _fake_sample(
    value: Tensor, spatial_shapes: Tensor, level_start_index: Tensor, locations: Tensor, weights: Tensor
) -> Tensor:
    return value.new_empty(weights.shape[0], weights.shape[1], value.shape[2] * value.shape[3])


@operator('ms_deform_sample_mmcv', fake=_fake_sample, device_types='cuda')
def _sample(
    value: Tensor, spatial_shapes: Tensor, level_start_index: Tensor, locations: Tensor, weights: Tensor
) -> Tensor:
    from mmcv.ops.multi_scale_deform_attn import ext_module

    # The kernel wants a batch that its step divides; one step for all images always does.
    return ext_module.ms_deform_attn_forward(
        value, spatial_shapes, level_start_index, locations, weights, im2col_step=len(value)
    )


def _fake_sample_backward(
    grad: Tensor, value: Tensor, spatial_shapes: Tensor, level_start_index: Tensor, locations: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(value), torch.empty_like(locations), torch.empty_like(weights)


@operator('ms_deform_sample_mmcv_backward', fake=_fake_sample_backward, device_types='cuda')
def _sample_backward(
    grad: Tensor, value: Tensor, spatial_shapes: Tensor, level_start_index: Tensor, locations: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    from mmcv.ops.multi_scale_deform_attn import ext_module

    grads = torch.zeros_like(value), torch.zeros_like(locations), torch.zeros_like(weights)
    ext_module.ms_deform_attn_backward(
        value,
        spatial_shapes,
        level_start_index,
        locations,
        weights,
        grad.contiguous(),
        *grads,
        im2col_step=len(value),
    )
    return grads


def _setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    value, locations, weights = _sample_backward(grad, *ctx.saved_tensors)
    return value, None, None, locations, weights


_sample.differentiate(_backward, _setup_context)
