"""Run an operator by one of its backends (implementations), and register those with torch as custom operators.

A name asks for exactly that backend, ``auto`` takes the first of a fixed order that can run. A backend that raises
:class:`~mmgate.errors.UnsupportedCall` hands the call on to the next one. All backends compute the same function: the
choice changes speed and memory alone. The environment variable ``MMGATE_<OP>=<backend>`` has the last word.

A custom operator (:func:`operator`) is a plain autograd function in eager mode, and a registered torch operator for
tracers: torch.compile, export, fake tensors, counters of operations. A call of a registered one costs several times as
much, which decoders of few queries feel. torch has ``torch.library.custom_op`` since 2.4; before that there is the
autograd function alone.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from mmgate.errors import ConfigError, UnsupportedCall

from .tracing import hides_numbers, is_compiling, is_exporting, is_traced

logger = logging.getLogger('mmgate')
# Where ``auto`` looks at a backend: before all others, in its place, or not at all, as it runs by its name alone.
Place = Literal['first', 'in order', 'by name']
OPERATORS: dict[str, tuple[Backend, ...]] = {}  # each operator's backends, in their order
FIRST = 'the first of the order that can run here'  # the reason of ``auto``
_logged: set[tuple[str, str]] = set()
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


def _nothing(tensor: Tensor) -> str | None:
    return None


def _in_order(tensor: Tensor) -> Place:
    return 'in order'


@dataclass(frozen=True)
class Backend:
    """One implementation of an operator, with the conditions under which it can run.

    Attributes:
        name: The name in configs, arguments and the environment variable.
        run: The implementation. It takes the operator's checked arguments, as one tuple, and raises
            :class:`~mmgate.errors.UnsupportedCall` for a call that it does not have.
        why_not: Takes the operator's first tensor and returns why this backend cannot run on it, or None if it can.
        place: Takes the operator's first tensor and returns where ``auto`` looks at this backend.
        traceable: True if torch.compile takes it whole, that is, it asks for no tensor's numbers.
        exportable: True if an exported model may hold it: it is traceable, and made of torch's own operators alone.
        description: A few words for the log.
        advice: Takes the operator's first tensor and returns what a user can do to have this backend, or None; for the
            log, if another backend runs.
    """

    name: str
    run: Callable[[Any], Tensor]
    why_not: Callable[[Tensor], str | None] = _nothing
    place: Callable[[Tensor], Place] = _in_order
    traceable: bool = True
    exportable: bool = False
    description: str = 'its backend'
    advice: Callable[[Tensor], str | None] = _nothing


def run_operator(op: str, tensor: Tensor, requested: str | None, arguments: Any) -> Tensor:
    """Run an operator with the best backend; if that cannot run this call, with the next one.

    Args:
        op: The operator's name.
        tensor: The input whose device and dtype decide.
        requested: A backend's name, ``'auto'`` or None, see :func:`candidates`.
        arguments: All arguments of the operator, checked, as the tuple that its backends take.

    Raises:
        ConfigError: See :func:`candidates`.
        UnsupportedCall: None of the candidates has this call.
    """
    chosen, reason = candidates(op, tensor, requested)
    first = chosen[0]
    if not is_traced() and (op, first.name) not in _logged:
        _log_choice(op, first, reason, tensor)
    for backend in chosen[:-1]:
        try:
            return backend.run(arguments)
        except UnsupportedCall as error:
            if not is_traced():
                message = f'{op}: {backend.name!r} hands a call on to the next: {error}'
                _log_once(op, f'{backend.name} refused', message)
    return chosen[-1].run(arguments)


def candidates(op: str, tensor: Tensor, requested: str | None = None) -> tuple[list[Backend], str]:
    """Return the backends to try for a call of an operator, the best first, and the reason why it is the best.

    Args:
        op: The operator's name.
        tensor: The input whose device and dtype decide.
        requested: A backend's name, or ``'auto'``, as None; the environment variable ``MMGATE_<OP>`` comes before it.

    Raises:
        ConfigError: An unknown name, or the backend asked for cannot run on ``tensor``; the message gives the reason.
    """
    variable = f'MMGATE_{op.upper()}'
    from_environment = os.environ.get(variable)
    name = from_environment or requested or 'auto'
    backends = OPERATORS[op]
    if name != 'auto':
        asked = backend_named(op, name, variable if from_environment else 'backend')
        reason = asked.why_not(tensor)
        if reason is not None:
            names = ', '.join(b.name for b in backends if b.why_not(tensor) is None)
            raise ConfigError(f'{op}: backend {name!r} cannot run here: {reason}. Usable here: {names}, auto.')
        return [asked], 'as asked for'
    if is_exporting():
        exportable = [backend for backend in backends if backend.exportable]
        return exportable[:1], 'the one that exported models can hold'
    hidden = hides_numbers(tensor)
    usable = [b for b in backends if (b.traceable or not hidden) and b.why_not(tensor) is None]
    return in_order(usable, tensor), FIRST


def in_order(backends: Sequence[Backend], tensor: Tensor) -> list[Backend]:
    """Return the backends that ``auto`` may take for a tensor, the preferred first."""
    # Not sorted by a key, which torch 2.5's compiler cannot trace.
    first = [backend for backend in backends if backend.place(tensor) == 'first']
    return first + [backend for backend in backends if backend.place(tensor) == 'in order']


def backend_named(op: str, name: Any, source: str = 'backend') -> Backend:
    """Return the backend of an operator that has this name.

    Raises:
        ConfigError: There is none of that name; the message lists the names there are.
    """
    by_name = {backend.name: backend for backend in OPERATORS[op]}
    if name not in by_name:
        raise ConfigError(f'{op}: {source}={name!r} is not a backend; choose one of {", ".join(["auto", *by_name])}.')
    return by_name[name]


def check_backend(op: str, name: str) -> None:
    """Raise ConfigError if ``name`` is neither ``'auto'`` nor the name of a backend of the operator."""
    if name != 'auto':
        backend_named(op, name)


def _log_choice(op: str, first: Backend, reason: str, tensor: Tensor) -> None:
    """Log which backend runs and why, and how the user gets a faster one."""
    line = f'{op} runs on {first.description} ({first.name!r}), {reason}'
    for other in OPERATORS[op] if reason == FIRST else ():
        advice = None if other is first else other.advice(tensor)
        if advice:
            line += f'. {advice}'
    _log_once(op, first.name, f'{line}.')


def _log_once(op: str, subject: str, text: str) -> None:
    """Log a message once for each operator and subject, in mmengine's log if there is one."""
    if (op, subject) in _logged:
        return
    _logged.add((op, subject))
    mmengine = sys.modules.get('mmengine.logging')
    if mmengine is None:
        logger.info(text)
    else:
        mmengine.print_log(text, logger='current')


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
