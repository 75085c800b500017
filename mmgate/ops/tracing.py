"""Detect whether code is being traced: by torch.compile, by an export, or by a mode that records operators.

Older torch versions lack some of these questions; below torch 2.3 nobody can tell that torch.compile is tracing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


def _never() -> bool:
    return False


_is_compiling: Callable[[], bool] = getattr(torch.compiler, 'is_compiling', _never)
# New in torch 2.7. Before, is_compiling is True in code that an export runs, and not where Dynamo reads it.
_is_exporting: Callable[[], bool] = getattr(torch.compiler, 'is_exporting', _is_compiling)


@torch.compiler.assume_constant_result
def _is_exporting_with_torch() -> bool:
    """Return True within torch.export.

    torch.compile calls this as it is, once, while it traces. If it traced the question, torch 2.7 to 2.11 would answer
    it with True.
    """
    if _is_exporting():
        return True
    # A strict export of torch 2.7 tells Dynamo alone, which reads the code.
    dynamo = sys.modules.get('torch._dynamo.symbolic_convert')
    reader = None if dynamo is None else getattr(dynamo.tls, 'current_tx', None)
    return reader is not None and reader.export


def is_compiling() -> bool:
    """Return True if torch.compile or an export is tracing; always False below torch 2.3, which cannot tell."""
    return _is_compiling()


def is_exporting() -> bool:
    """Return True if a model is being exported, by torch.export, jit.trace or torch.onnx."""
    return (is_compiling() and _is_exporting_with_torch()) or torch.jit.is_tracing() or torch.onnx.is_in_onnx_export()


def is_traced() -> bool:
    """Return True if a tracer or a dispatch mode is active, which sees every operator that runs.

    Examples are torch.compile, an export, fake tensors and counters of operations. They need registered operators.
    """
    return is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def hides_numbers(tensor: Tensor) -> bool:
    """Return True if a tensor's values cannot be read, because it is fake, on ``'meta'``, or being traced.

    Counters of operations and selective checkpointing look at operators, too, but leave the numbers.
    """
    if is_compiling() or tensor.device.type == 'meta':
        return True
    modes = _get_current_dispatch_mode_stack()
    if not modes:
        return False
    # Their import takes a second.
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode

    return any(isinstance(mode, (FakeTensorMode, ProxyTorchDispatchMode)) for mode in modes)
