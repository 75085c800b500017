"""Backend of deformable attention by the package deformops, with Triton and CUDA kernels.

The package is imported when a CUDA tensor asks for it, so that ``mmgate.ops`` needs torch alone. Without a gate its
kernels form the softmax, so that no weights are written to memory; with one they get finished weights.

Tests run this backend on a stand-in of the package's signature; with the package itself it was run once, on an H100.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from mmgate.errors import UnsupportedCall

from .uneven import OFF, padded
from .weights import attention_weights, offset_locations

INSTALL = 'pip install "mmgate[deformops]"'
PYTHON = (3, 12)  # the oldest that the package supports
CAPABILITY = (7, 0)  # of the oldest GPUs that its Triton kernels support
MOST_NUMBERS = 2**31 - 1  # of a tensor, for 32-bit offsets


@functools.cache
def missing() -> str | None:
    """Return the reason why the package deformops cannot be imported, or None if it can."""
    if importlib.util.find_spec('deformops') is None:
        if sys.version_info < PYTHON:
            return 'deformops is not installed; it needs Python 3.12 or newer'
        return f'deformops is not installed: {INSTALL}'
    try:
        import deformops.registry  # noqa: F401
    except (ImportError, OSError) as error:
        return f'deformops does not load: {error}'
    return None


@torch.compiler.assume_constant_result
def _too_old(index: int | None) -> bool:
    """Return True if the GPU with this index is older than deformops' kernels support."""
    return torch.cuda.get_device_capability(index) < CAPABILITY


@torch.compiler.assume_constant_result
def _missing() -> str | None:
    """Return why deformops cannot be imported, or None; torch.compile calls this once, while it traces."""
    return missing()


def why_not(value: Tensor) -> str | None:
    """Return the reason why this backend cannot run on ``value``, or None if it can."""
    if value.device.type != 'cuda':
        return f'it is for CUDA tensors, value is on {value.device}'
    if torch.version.hip is not None:
        return 'it is for NVIDIA GPUs, this torch is built for ROCm'
    if value.dtype == torch.float64:
        return 'it has no kernel for float64'
    if torch.are_deterministic_algorithms_enabled():
        return 'it adds up the gradients of the values in no fixed order, and torch.use_deterministic_algorithms is on'
    reason = _missing()
    if reason is None and _too_old(value.device.index):
        return f'it needs a GPU of compute capability {CAPABILITY[0]}.{CAPABILITY[1]} or newer'
    return reason


def attend(
    *,
    value: Tensor,
    spatial_shapes: Tensor,
    level_start_index: Tensor,
    points: Tensor,
    logits: Tensor,
    gate: Tensor | None,
    residual: bool,
    position: str,
    reference_points: Tensor | None,
    num_points: Sequence[int] | None = None,
) -> Tensor:
    """Compute deformable attention from logits; the arguments are those of :func:`mmgate.ops.ms_deform_attn`.

    ``points`` are sampling locations, or offsets if there are reference points. Levels of fewer points than others are
    filled up with weights of 0. The kernels read weights in the dtype of the values, so 16-bit values round them.
    Gradients are summed in float32.

    Raises:
        UnsupportedCall: Empty tensors, float64 beside other values, or more numbers than 32-bit offsets reach.
    """
    from deformops.registry import msda

    _check_call(value, points, logits, gate, reference_points)
    locations = points
    if reference_points is not None:
        locations = offset_locations(points, reference_points, spatial_shapes, num_points)
    # Far off the map nothing is added, but in the package's kernels NaN and infinity would spread to the output.
    locations = locations.nan_to_num(nan=-9.0).clamp(-9, 9)
    if gate is None and num_points is None:
        weights = logits
        method = 'softmax'
    else:
        weights = attention_weights(logits, gate, residual=residual, position=position)
        method = 'linear'
    if num_points is not None:
        locations = padded(locations, num_points, OFF)
        weights = padded(weights, num_points, 0.0)
    return msda(
        value.contiguous(),
        spatial_shapes.contiguous(),
        level_start_index.contiguous(),
        locations.contiguous(),
        weights.to(value.dtype).contiguous(),
        method=method,
        fp32acc=True,
    )


def _check_call(
    value: Tensor, points: Tensor, logits: Tensor, gate: Tensor | None, reference_points: Tensor | None
) -> None:
    """Raise UnsupportedCall for arguments that deformops' kernels do not take."""
    takes = "ms_deform_attn: 'deformops' takes"
    if not value.numel() or not logits.numel():
        raise UnsupportedCall(f'{takes} no empty tensors.')
    given = [x for x in (value, points, logits, gate, reference_points) if x is not None]
    if any(x.dtype == torch.float64 for x in given):
        raise UnsupportedCall(f'{takes} no float64.')
    largest = max(value.numel(), points.numel(), logits.shape[:3].numel() * value.shape[3])
    if largest > MOST_NUMBERS:
        raise UnsupportedCall(f'{takes} tensors of fewer than 2^31 numbers, one has {largest}.')
