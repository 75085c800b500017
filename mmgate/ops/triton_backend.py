"""Helpers that the Triton backends share: conditions to run, launching, the GPU's architecture."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from subprocess import CalledProcessError
from typing import Any

import torch
from torch import Tensor

from mmgate.errors import UnsupportedCall, first_line

from .tracing import is_traced

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
OLDEST = (3, 2)  # version of Triton
MAX_DIM = 128  # the most channels of a head
COMPILED = (80, 86, 89, 90, 100, 120)  # architectures for which our checks compile the kernels
MEASURED = (90,)  # architectures on which we have run the kernels beside other packages'


@torch.compiler.assume_constant_result
def _why_unavailable() -> str | None:
    """Return :func:`why_unavailable`; torch.compile calls this once, as it traces no import that fails."""
    return why_unavailable()


@functools.cache
def why_unavailable() -> str | None:
    """Return the reason why there is no Triton for our kernels, or None."""
    try:
        import triton
    except ImportError:
        return 'triton is not installed: pip install "mmgate[triton]"'
    version = tuple(int(part) for part in triton.__version__.split('.')[:2])
    if version < OLDEST:
        return f'triton {triton.__version__} is too old, the kernels need 3.2, which comes with torch 2.6 and newer'
    return None


def interpreted() -> bool:
    """Return True if Triton's interpreter is on, in which kernels run on the CPU."""
    return os.environ.get('TRITON_INTERPRET') == '1'


_reasons: dict[tuple[Any, ...], str | None] = {}  # why kernels did not compile, by compile_only's arguments


def _on(device: torch.device) -> AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == 'cuda' else nullcontext()


def launch(kernel: Any, grid: Any, device: torch.device, *arguments: Any, **constants: Any) -> None:
    """Launch a Triton kernel on a device.

    Raises:
        UnsupportedCall: The kernel does not compile here, so that ``auto`` goes on with another backend.
    """
    with _on(device):
        error = _failure_of(kernel[grid], *arguments, **constants)
    if error is not None:
        raise UnsupportedCall(
            f'a Triton kernel does not compile on {device}, take another backend: {_reason(error)}'
        ) from error


def needs_backward(tensors: Iterable[Any]) -> bool:
    """Return True if the backward pass of a call will come, and its kernels are to be compiled in the forward pass.

    There ``auto`` can still take another backend. torch.compile has chosen already, and the interpreter compiles
    nothing.
    """
    if is_traced() or interpreted() or not torch.is_grad_enabled():
        return False
    return any(isinstance(x, Tensor) and x.requires_grad for x in tensors)


def compile_only(kernel: Any, grid: Any, device: torch.device, *arguments: Any, **constants: Any) -> None:
    """Compile a Triton kernel, once, as :func:`launch` would for these arguments, and do not run it.

    A dtype may be given instead of a tensor.

    Raises:
        UnsupportedCall: The kernel does not compile here.
    """
    dtypes = (x.dtype if isinstance(x, Tensor) else x for x in arguments if isinstance(x, (Tensor, torch.dtype)))
    key = (kernel, device, *dtypes, *constants.items())
    if key not in _reasons:
        with _on(device):
            error = _failure_of(kernel.warmup, *arguments, grid=grid, **constants)
        _reasons[key] = None if error is None else _reason(error)
    if _reasons[key] is not None:
        raise UnsupportedCall(
            f'a backward kernel of Triton does not compile on {device}, take another backend: {_reasons[key]}'
        )


def _failure_of(call: Any, *arguments: Any, **constants: Any) -> Exception | None:
    """Call Triton, and return the error of a kernel, or of the C module that launches it, that does not compile."""
    from triton.errors import TritonError

    failures = () if interpreted() else (TritonError, CalledProcessError)
    try:
        # Triton 3.10 turned fused multiply-add off by default.
        call(*arguments, enable_fp_fusion=True, **constants)
    except failures as error:
        return error
    return None


def _reason(error: Exception) -> str:
    return f'{type(error).__name__}: {error}'.strip()[:500]


@functools.cache
def target_of(device: torch.device) -> Any:
    """Return the compile target that Triton has for a device, such as ``backend='cuda'``, ``arch=90``."""
    from triton.runtime import driver

    with _on(device):
        return driver.active.get_current_target()


@torch.compiler.assume_constant_result
def _cannot_start(index: int) -> str | None:
    """Return the reason why Triton cannot start on a GPU, or None; torch.compile calls this once, while it traces."""
    return start_error(index)


@functools.cache
def start_error(index: int) -> str | None:
    """Look for a GPU by Triton and return the error of that, or None, as for fake tensors where there is no GPU.

    Triton then compiles a C module, if it has none in its cache. So a compiler or Python's headers may be missing.
    """
    if not torch.cuda.is_available():
        return None
    try:
        target_of(torch.device('cuda', index))
    except Exception as error:  # a compiler's exit status, a missing driver, a missing file
        return f"Triton cannot start, which needs a C compiler and Python's headers ({first_line(error)[:200]})"
    return None


def why_not_triton(heads: Tensor) -> str | None:
    """Return the reason why Triton kernels cannot run on a tensor ``(..., d)`` of heads, or None if they can."""
    if heads.device.type != 'cuda' and not interpreted():
        return f'it is for CUDA tensors, not for {heads.device} (TRITON_INTERPRET=1 runs it slowly on the CPU)'
    if heads.dtype not in DTYPES:
        return f'it is for float32, float16 and bfloat16, not for {heads.dtype}'
    if heads.shape[-1] > MAX_DIM:
        return f'it is for heads of {MAX_DIM} channels or fewer, not of {heads.shape[-1]}'
    return _why_unavailable() or (None if interpreted() else _cannot_start(heads.device.index))


@torch.compiler.assume_constant_result
def _architecture(index: int) -> int:
    """Return :func:`architecture`; torch.compile calls this once, while it traces."""
    return architecture(index)


@functools.cache
def architecture(index: int) -> int:
    """Return the number of an NVIDIA GPU's architecture, such as 90 for sm_90; 0 if there is no such GPU.

    Fake tensors may be on a GPU that is not there.
    """
    if torch.version.hip is not None or not torch.cuda.is_available():
        return 0
    major, minor = torch.cuda.get_device_capability(index)
    return 10 * major + minor


def is_compiled(heads: Tensor) -> bool:
    """Return True on GPUs for which our checks compile the kernels."""
    return heads.device.type == 'cuda' and not interpreted() and _architecture(heads.device.index) in COMPILED


def is_measured(heads: Tensor) -> bool:
    """Return True on GPUs like the one on which we found the kernels faster than other packages' operators."""
    return is_compiled(heads) and _architecture(heads.device.index) in MEASURED


def advice(heads: Tensor, why_not: str | None) -> str | None:
    """Return what to try on a GPU on which nobody has timed the kernels, if they can run there, or None."""
    if heads.device.type != 'cuda' or why_not is not None or is_measured(heads):
        return None
    return (
        "'triton' was never timed on this kind of GPU: python -m mmgate.doctor --time does it, and backend='triton' "
        'takes it'
    )


def power_of_two(width: int) -> int:
    """Return the power of two, at least 16, to which kernels pad so many channels."""
    return max(16, 1 << (width - 1).bit_length())
