"""Choose the backend (implementation) that runs an operator, by a fixed order.

A name asks for exactly that backend. ``auto`` takes the first of the order that can run. A backend that raises
:class:`~mmgate.errors.UnsupportedCall` hands the call on to the next one. All backends compute the same function. The
choice changes speed and memory alone.

The environment variable ``MMGATE_<OP>=<backend>`` has the last word for one operator.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from mmgate.errors import ConfigError, UnsupportedCall

from .tracing import hides_numbers, is_exporting, is_traced

logger = logging.getLogger('mmgate')
# Where ``auto`` looks at a backend: before all others, in its place, or not at all, as it runs by its name alone.
Place = Literal['first', 'in order', 'by name']
OPERATORS: dict[str, tuple[Backend, ...]] = {}  # each operator's backends, in their order
FIRST = 'the first of the order that can run here'  # the reason of ``auto``
_logged: set[tuple[str, str]] = set()


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
