"""Load the library of mmgate's C++ CPU kernels, which ``python -m mmgate.doctor --build`` compiles.

Its sources include no header of torch, so that one library serves every torch.
"""

from __future__ import annotations

import ctypes
import functools
import typing
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import build

COMMAND = 'python -m mmgate.doctor --build'
# The numbers of C++'s ``enum Type``.
TYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3, torch.int64: 4}
FLOATING = tuple(dtype for dtype in TYPES if dtype.is_floating_point)
OWN_THREADS = False  # instead of torch's; for a thread sanitizer, which does not know those of OpenMP


@functools.cache
def load() -> tuple[Any, str | None]:
    """Load the compiled library; return it and None, or None and the reason why it cannot be loaded."""
    path = build.library()
    if not path.is_file():
        return None, f'it is not compiled for this processor yet; type once: {COMMAND}'
    try:
        library = ctypes.CDLL(str(path))
        library.mmgate_built_from.restype = ctypes.c_char_p
        same = library.mmgate_built_from().decode() == build.built_from()
    except (OSError, AttributeError) as error:
        return None, f'{path.name} does not load ({error}); type: {COMMAND}'
    if not same:
        return None, f'it was compiled from other sources or for another processor; type: {COMMAND}'
    return library, None


@torch.compiler.assume_constant_result
def why_unavailable() -> str | None:
    """Return the reason why the library cannot be loaded, or None if it can.

    torch.compile calls this once, while it traces.
    """
    return load()[1]


def why_not_native(tensor: Tensor) -> str | None:
    """Return the reason why the kernels cannot run on a tensor, or None if they can."""
    if tensor.device.type != 'cpu':
        return f'it is for CPU tensors, not for {tensor.device}'
    return why_unavailable()


def advice_for_native(tensor: Tensor) -> str | None:
    """Return a hint how the user gets the kernels, such as to build the library, or None."""
    reason = why_not_native(tensor) if tensor.device.type == 'cpu' else None
    return reason and f"'native', which is faster, does not run: {reason}"


class Numbers(ctypes.Structure):
    """A tensor as the kernels see it, C++'s struct ``Numbers``: address and type of its numbers, null for None.

    It keeps no tensor alive.
    """

    _fields_ = [('data', ctypes.c_void_p), ('type', ctypes.c_int64)]


def numbers(tensor: Tensor | None) -> Numbers:
    """Return a tensor's address and type."""
    return Numbers() if tensor is None else Numbers(tensor.data_ptr(), TYPES[tensor.dtype])


# C's types of an operator's arguments.
C_TYPES: dict[Any, Any] = {
    Tensor: Numbers,
    Tensor | None: Numbers,
    bool: ctypes.c_int64,
    str: ctypes.c_int64,
    Sequence[int] | None: ctypes.POINTER(ctypes.c_int64),
}


def fields_of(arguments: type[tuple[Any, ...]]) -> list[tuple[str, Any]]:
    """Return the fields of a named tuple as fields of a ctypes structure."""
    return [(name, C_TYPES[ctype]) for name, ctype in typing.get_type_hints(arguments).items()]


def fields(ctype: Any, names: str) -> list[tuple[str, Any]]:
    """Return fields of one type for a ctypes structure; ``names`` has their names, separated by spaces."""
    return [(name, ctype) for name in names.split()]
