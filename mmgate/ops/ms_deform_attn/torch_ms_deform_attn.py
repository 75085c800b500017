"""Backend of deformable attention by the package torch-ms-deform-attn, in C++ for CPUs, CUDA and Metal.

The package is imported when a tensor asks for it, so that ``mmgate.ops`` needs torch alone. It samples; gate, softmax
and locations are formed before, by :func:`.weights.attend_by`.
"""

from __future__ import annotations

import functools
import importlib.util

import torch
from torch import Tensor

from mmgate.errors import UnsupportedCall

from ..tracing import is_traced

DEVICES = ('cpu', 'cuda', 'mps')
INSTALL = 'pip install --no-build-isolation --no-deps torch-ms-deform-attn'


@functools.cache
def missing() -> str | None:
    """Return the reason why the package torch-ms-deform-attn cannot be imported, or None if it can."""
    if importlib.util.find_spec('torch_ms_deform_attn') is None:
        return f'torch-ms-deform-attn is not installed: {INSTALL}'
    try:
        import torch_ms_deform_attn  # noqa: F401
    except (ImportError, OSError) as error:
        return f'torch-ms-deform-attn does not load; build it again for this torch: {error}'
    return None


@torch.compiler.assume_constant_result
def _missing() -> str | None:
    """Return why torch-ms-deform-attn cannot be imported, or None; torch.compile calls this once, while it traces."""
    return missing()


def why_not(value: Tensor) -> str | None:
    """Return the reason why this backend cannot run on ``value``, or None if it can."""
    if value.device.type not in DEVICES:
        return f'it is for CPU, CUDA and MPS tensors, value is on {value.device}'
    if value.device.type == 'mps' and value.dtype == torch.float64:
        return 'it has no float64 on MPS'
    if value.device.type != 'cpu' and torch.are_deterministic_algorithms_enabled():
        return 'it adds up the gradients of the values in no fixed order, and torch.use_deterministic_algorithms is on'
    return _missing()


def sample(
    value: Tensor, spatial_shapes: Tensor, level_start_index: Tensor, sampling_locations: Tensor, weights: Tensor
) -> Tensor:
    """Sample the values and sum them by weights with the package's kernels, like :func:`.reference.sample`.

    It is computed in float32 for 16-bit inputs, and in float64 if an input is float64.

    Raises:
        UnsupportedCall: An empty batch, no queries, or a level without a pixel.
    """
    from torch_ms_deform_attn import ms_deform_attn

    if not value.numel() or not weights.numel():
        raise UnsupportedCall("ms_deform_attn: 'torch_ms_deform_attn' takes no empty tensors.")
    # The package itself reads the sizes on CPUs and on MPS, and trusts them on CUDA.
    if not is_traced() and value.device.type != 'cuda' and not bool((spatial_shapes > 0).all()):
        sizes = spatial_shapes.tolist()
        raise UnsupportedCall(f"ms_deform_attn: 'torch_ms_deform_attn' takes no level without a pixel, got {sizes}.")
    compute = torch.promote_types(torch.promote_types(value.dtype, weights.dtype), sampling_locations.dtype)
    compute = torch.promote_types(compute, torch.float32)
    output = ms_deform_attn(
        value.to(compute),
        spatial_shapes.long(),
        level_start_index.long(),
        sampling_locations.to(compute),
        weights.to(compute),
    )
    return output.to(value.dtype)
