"""Whether a call is traced: by torch.compile, by an export, or by something else that looks at operators.

Older torch versions lack some of these questions; below torch 2.3 nobody can tell that torch.compile is tracing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


def _never() -> bool:
    return False


_is_compiling: Callable[[], bool] = getattr(torch.compiler, 'is_compiling', _never)
_is_exporting: Callable[[], bool] = getattr(torch.compiler, 'is_exporting', _never)  # torch 2.7


def is_compiling() -> bool:
    """Return whether torch.compile or an export is tracing; False below torch 2.3, which cannot tell."""
    return _is_compiling()


def is_exporting() -> bool:
    """Return whether a model is written down for another runtime, by torch.export, jit.trace or torch.onnx."""
    return (is_compiling() and _is_exporting()) or torch.jit.is_tracing() or torch.onnx.is_in_onnx_export()


def is_traced() -> bool:
    """Return whether something looks at operators rather than at numbers: a tracer or a dispatch mode."""
    return is_compiling() or torch._C._len_torch_dispatch_stack() > 0
