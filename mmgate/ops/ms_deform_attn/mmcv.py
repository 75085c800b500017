"""Multi-scale deformable sampling by mmcv's CUDA operator, as one registered torch op.

The import of mmcv is put off until a CUDA tensor asks for it, so that ``mmgate.ops`` needs torch alone.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from .registered import sampling_operator


@functools.cache
def missing() -> str | None:
    """Return why mmcv has no operator for CUDA, or None."""
    try:
        from mmcv.ops import get_compiling_cuda_version, multi_scale_deform_attn
    except ImportError as error:
        return f'mmcv with compiled operators is not installed ({error})'
    own = multi_scale_deform_attn.ext_module.__name__ == 'mmcv._ext'  # a benchmark may have put another there
    if own and get_compiling_cuda_version() == 'not available':
        return 'mmcv was built without CUDA; build it where torch.version.cuda is set and nvcc is found'
    return None


def why_not(value: Tensor) -> str | None:
    """Return why this backend cannot run on ``value``, or None."""
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
    """Weighted sampling, as :func:`mmgate.ops.ms_deform_attn.reference.sample`.

    Computed in float32 for every input dtype: mmcv's kernel has no bfloat16, and in float16 it rounds the coordinates.
    """
    values, locations, shares = (x.float().contiguous() for x in (value, sampling_locations, weights))
    return _operator(values, spatial_shapes, level_start_index, locations, shares).to(value.dtype)


def _sample(value: Tensor, *others: Tensor) -> Tensor:
    from mmcv.ops.multi_scale_deform_attn import ext_module

    # The kernel wants a batch that its step divides; one step for all images always does.
    return ext_module.ms_deform_attn_forward(value, *others, im2col_step=len(value))


def _sample_backward(grad: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    from mmcv.ops.multi_scale_deform_attn import ext_module

    *inputs, _ = arguments  # the values' gradient comes with the others
    grads = tuple(torch.zeros_like(inputs[i]) for i in (0, 3, 4))
    ext_module.ms_deform_attn_backward(*inputs, grad.contiguous(), *grads, im2col_step=len(inputs[0]))
    return grads


_operator = sampling_operator('ms_deform_sample_mmcv', _sample, _sample_backward)
