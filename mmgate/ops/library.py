"""How an operator of ours meets torch: a plain autograd function in eager mode, a registered operator in graphs.

A registered operator costs several times an autograd function a call, which decoders of few queries feel, and is of use
only to what traces: torch.compile, export, fake tensors, counters of operations. torch has had ``custom_op`` since 2.4;
below that the autograd function is all there is. What else differs between the torch versions stands here, too.
"""

from __future__ import annotations

import typing
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.autograd.function import once_differentiable

CAN_REGISTER = hasattr(torch.library, 'custom_op')

_Function = TypeVar('_Function', bound=Callable[..., Any])
_is_compiling: Callable[[], bool] = getattr(torch.compiler, 'is_compiling', lambda: False)
_is_exporting: Callable[[], bool] = getattr(torch.compiler, 'is_exporting', lambda: False)  # torch 2.7


def is_compiling() -> bool:
    """Return whether torch.compile or an export is tracing; False below torch 2.3, which cannot tell."""
    return _is_compiling()


def is_exporting() -> bool:
    """Return whether a model is written down for another runtime, by torch.export, jit.trace or torch.onnx."""
    return (is_compiling() and _is_exporting()) or torch.jit.is_tracing() or torch.onnx.is_in_onnx_export()


def is_traced() -> bool:
    """Return whether something looks at operators rather than at numbers: a tracer or a dispatch mode."""
    return is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def outside_graphs(function: _Function) -> _Function:
    """Keep torch.compile out of ``function`` below torch 2.4, where nothing in it can be registered."""
    return function if CAN_REGISTER else torch.compiler.disable(function)


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Return the dtype that autocast gives to matrix products on ``device_type``, or None where it is off."""
    if device_type == 'meta':
        return None
    if hasattr(torch, 'get_autocast_dtype'):  # torch 2.4
        return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
    if device_type == 'cpu':
        return torch.get_autocast_cpu_dtype() if torch.is_autocast_cpu_enabled() else None
    return torch.get_autocast_gpu_dtype() if device_type == 'cuda' and torch.is_autocast_enabled() else None


def without_autocast(device_type: str) -> torch.autocast:
    """Return a context without autocast, which does not know the device ``'meta'``."""
    return torch.autocast('cpu' if device_type == 'meta' else device_type, enabled=False)


class Operator:
    """A function of tensors that torch knows as ``torch.ops.mmgate.<name>`` where it can.

    Args:
        name: Of the operator.
        run: The implementation. It returns fresh tensors and calls nothing that autocast converts.
        fake: Same arguments; returns empty tensors of the results' shapes, dtypes and strides.
        schema: Of the arguments and results, ``'(Tensor x, bool b) -> Tensor'``; by default the annotations of ``run``.
    """

    def __init__(self, name: str, run: Callable[..., Any], fake: Callable[..., Any], schema: str | None = None) -> None:
        self.run = self._eager = run
        self._registered: Any = None
        if CAN_REGISTER:
            # torch 2.4 reads the annotations as they stand, which are strings where they are postponed
            run.__annotations__ = typing.get_type_hints(run)
            self._registered = torch.library.custom_op(f'mmgate::{name}', run, mutates_args=(), schema=schema)
            self._registered.register_fake(fake)

    def __call__(self, *inputs: Any) -> Any:
        """Run on ``inputs``, all by position."""
        return self._registered(*inputs) if self._registered and is_traced() else self._eager(*inputs)

    def differentiate(self, backward: Callable[..., Any], setup_context: Callable[..., None]) -> None:
        """Give the operator its gradient, once differentiable.

        Args:
            backward: ``(ctx, *output gradients) -> input gradients``, one for each input, None for what has none.
            setup_context: ``(ctx, inputs, output)``, saves what ``backward`` needs.
        """
        run, once = self.run, once_differentiable(backward)

        class Eager(torch.autograd.Function):
            # ctx comes first: torch binds the arguments by name where setup_context stands apart, which takes longer
            @staticmethod
            def forward(ctx: Any, *inputs: Any) -> Any:
                output = run(*inputs)
                setup_context(ctx, inputs, output)
                return output

            backward = staticmethod(once)  # type: ignore[assignment]

        self._eager = Eager.apply
        if self._registered:
            self._registered.register_autograd(backward, setup_context=setup_context)


def operator(name: str, fake: Callable[..., Any], schema: str | None = None) -> Callable[..., Operator]:
    """Decorate an implementation to make it an :class:`Operator`."""
    return lambda run: Operator(name, run, fake, schema)
