"""Custom operators: plain autograd functions in eager mode, registered torch operators under torch.compile.

A call of a registered operator costs several times a call of an autograd function, which decoders of few queries feel.
Only tracers need the registered one: torch.compile, export, fake tensors, counters of operations. torch has had
``torch.library.custom_op`` since 2.4; before that there is the autograd function alone.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from mmgate.errors import UnsupportedCall

from .tracing import is_compiling, is_traced

CAN_REGISTER = hasattr(torch.library, 'custom_op')

# Types of an operator's arguments in torch's schemas.
SCHEMA_TYPES: dict[Any, str] = {
    Tensor: 'Tensor',
    Tensor | None: 'Tensor?',
    bool: 'bool',
    str: 'str',
    Sequence[int] | None: 'int[]?',
}

_Function = TypeVar('_Function', bound=Callable[..., Any])
_Fields = TypeVar('_Fields', bound=tuple[Any, ...])


def outside_graphs(function: _Function) -> _Function:
    """Decorator: keep torch.compile out of a function below torch 2.4, which cannot register custom operators."""
    return function if CAN_REGISTER else torch.compiler.disable(function)


class _WithoutGradient(torch.autograd.Function):
    """The identity, whose gradient is an error."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        # Copies, because the inputs themselves would become views, which nobody may change in place.
        return tuple(x.clone() for x in tensors)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise UnsupportedCall(
            'this backend of mmgate has first derivatives alone. For second derivatives, such as of a gradient '
            'penalty, take the one in plain PyTorch, backend="torch".'
        )


def first_derivatives(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator for the backward pass of an autograd function: refuse second derivatives, which it does not have.

    torch's ``once_differentiable`` refuses them only where the output's gradient itself requires a gradient. The
    gradients depend on the saved inputs as well, and a second derivative without that part is silently wrong.

    Raises:
        UnsupportedCall: In the backward pass of the gradients.
    """

    @functools.wraps(backward)
    def checked(ctx: Any, *grads: Any) -> Any:
        with torch.no_grad():
            results = backward(ctx, *grads)
        if not torch.is_grad_enabled():  # it is on where the caller has create_graph=True
            return results
        results = results if isinstance(results, tuple) else (results,)
        refusing = iter(_WithoutGradient.apply(*(x.detach().requires_grad_() for x in results if x is not None)))
        return tuple(None if x is None else next(refusing) for x in results)

    return checked


class Operator:
    """A function of tensors that is registered with torch as ``torch.ops.mmgate.<name>``, from torch 2.4 on.

    Args:
        name: The operator's name.
        run: The implementation. It returns fresh tensors and calls nothing that autocast converts.
        fake: Takes the same arguments and returns empty tensors of the results' shapes, dtypes and strides.
        schema: Types of the arguments and results, such as ``'(Tensor x, bool b) -> Tensor'``; by default the
            annotations of ``run``.
    """

    def __init__(self, name: str, run: Callable[..., Any], fake: Callable[..., Any], schema: str | None = None) -> None:
        self.run = run
        self._eager = run
        self._registered: Any = None
        if CAN_REGISTER:
            # torch 2.4 reads the annotations as they are, which are strings where they are postponed.
            run.__annotations__ = typing.get_type_hints(run)
            self._registered = torch.library.custom_op(f'mmgate::{name}', run, mutates_args=(), schema=schema)
            self._registered.register_fake(fake)

    def __call__(self, *inputs: Any) -> Any:
        """Call the operator; all arguments are by position, as autograd functions take them.

        Raises:
            UnsupportedCall: In a transform of ``torch.func``, such as ``grad`` or ``vmap``, which torch's custom
                operators do not support.
        """
        if not is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None:
            raise UnsupportedCall(
                'this backend of mmgate does not run under transforms of torch.func. '
                'Take the one in plain PyTorch, backend="torch".'
            )
        return self._registered(*inputs) if self._registered and is_traced() else self._eager(*inputs)

    def differentiate(self, backward: Callable[..., Any], setup_context: Callable[..., None]) -> None:
        """Register the operator's gradient, which has no gradient itself.

        Args:
            backward: ``(ctx, *output gradients) -> input gradients``, one for each input, None for what has none.
            setup_context: ``(ctx, inputs, output)``, saves what ``backward`` needs.
        """
        run = self.run
        once = first_derivatives(backward)

        class Eager(torch.autograd.Function):
            # With ctx as its first argument. torch binds the arguments by name if setup_context is a method apart,
            # which takes longer.
            @staticmethod
            def forward(ctx: Any, *inputs: Any) -> Any:
                output = run(*inputs)
                setup_context(ctx, inputs, output)
                return output

            backward = staticmethod(once)

        self._eager = Eager.apply
        if self._registered:
            self._registered.register_autograd(once, setup_context=setup_context)


def operator(name: str, fake: Callable[..., Any], schema: str | None = None) -> Callable[..., Operator]:
    """Decorator: make a custom operator of a function; see :class:`Operator`."""
    return lambda run: Operator(name, run, fake, schema)


def arguments_of(fields: type[tuple[Any, ...]]) -> str:
    """Return the fields of a named tuple as arguments of a schema, such as ``'Tensor value, Tensor? gate'``.

    torch 2.4 does not read lists from annotations.
    """
    return ', '.join(f'{SCHEMA_TYPES[kind]} {name}' for name, kind in typing.get_type_hints(fields).items())


@functools.cache
def tensors_of(fields: type[tuple[Any, ...]]) -> tuple[str, ...]:
    """Return the names of the fields of a named tuple that are tensors, or None instead."""
    return tuple(name for name, kind in typing.get_type_hints(fields).items() if kind in (Tensor, Tensor | None))


def save_fields(ctx: Any, fields: tuple[Any, ...], *more: Tensor) -> None:
    """Save the arguments of an autograd function, a named tuple, and further tensors for its backward pass."""
    kind: Any = type(fields)
    names = tensors_of(kind)
    ctx.save_for_backward(*more, *[getattr(fields, name) for name in names])
    ctx.others = {name: getattr(fields, name) for name in kind._fields if name not in names}


def saved_fields(ctx: Any, kind: type[_Fields]) -> tuple[_Fields, list[Tensor]]:
    """Return what :func:`save_fields` saved: the arguments, a named tuple ``kind``, and the further tensors."""
    names = tensors_of(kind)
    saved = list(ctx.saved_tensors)
    first = len(saved) - len(names)
    return kind(**dict(zip(names, saved[first:], strict=True)), **ctx.others), saved[:first]
