"""Choosing the implementation of an operator.

Every operator has an ordered tuple of :class:`Backend`. A name asks for exactly that one, and raises with the reason
when it cannot run. ``auto`` takes what was measured on this machine, see :mod:`mmgate.ops.measure`; where nothing may
be measured, the first of the order that can run on the inputs. All backends compute the same function, so the choice
changes speed and memory alone.

Environment: ``MMGATE_<OP>=<backend>`` has the last word for one operator; ``MMGATE_DISPATCH=measure|static|<backend>``
says what ``auto`` does, the name being for the operators that have it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .library import is_exporting, is_traced

logger = logging.getLogger('mmgate')
POLICIES = ('measure', 'static')
_announced: set[tuple[str, str]] = set()
_names: set[str] = set()


@dataclass(frozen=True)
class Backend:
    """One implementation of an operator.

    Attributes:
        name: What a config, an argument or the environment variable calls it.
        why_not: Takes the operator's first tensor and returns why this backend cannot run on it, or None if it can.
        run: The implementation.
        in_order: Whether ``auto`` may take it unmeasured.
        traceable: Whether torch.compile takes it whole, that is, it asks the host for no tensor's numbers.
        plain: Whether it is made of torch's own operators alone, and traceable, as an exported model has to be.
        largest: Numbers in the reference's largest tensor from which on it is not even tried, for want of memory.
    """

    name: str
    why_not: Callable[[torch.Tensor], str | None]
    run: Callable[..., torch.Tensor]
    in_order: bool = True
    traceable: bool = True
    plain: bool = False
    largest: int | None = None

    def __post_init__(self) -> None:
        _names.add(self.name)


@dataclass(frozen=True)
class Problems:
    """What measuring has to know of an operator; each takes the arguments of :attr:`Backend.run`.

    Attributes:
        shape_class: What a choice holds for: a tuple of numbers and words.
        small: Arguments of a small fixed problem of the same variant, on the CPU.
        elements: How many numbers the reference's largest tensor has.
    """

    shape_class: Callable[..., tuple[Any, ...]]
    small: Callable[..., tuple[Any, ...]]
    elements: Callable[..., int]


def select(
    op: str,
    backends: Sequence[Backend],
    tensor: torch.Tensor,
    requested: str | None = None,
    problems: Problems | None = None,
    arguments: tuple[Any, ...] = (),
) -> Backend:
    """Return the backend of ``op`` that runs on ``tensor``.

    The order of precedence is the environment variable ``MMGATE_<OP>`` (``MMGATE_MS_DEFORM_ATTN=torch``), then
    ``requested``, then ``MMGATE_DISPATCH``.

    Args:
        op: The operator's name.
        backends: What there is, the preferred first; ``'torch'`` is the reference.
        tensor: The input whose device and dtype decide.
        requested: A backend's name, ``'auto'`` or None, which means ``'auto'``.
        problems: How to measure, None for the order alone.
        arguments: Of this call, for ``problems``.

    Raises:
        ValueError: An unknown name, or the backend asked for cannot run on ``tensor``; the message gives the reason.
    """
    variable = f'MMGATE_{op.upper()}'
    from_environment = os.environ.get(variable)
    name, source = from_environment or requested or 'auto', variable if from_environment else 'backend'
    policy = os.environ.get('MMGATE_DISPATCH') or 'measure'
    if name == 'auto' and policy not in POLICIES:
        if any(backend.name == policy for backend in backends):
            name, source = policy, 'MMGATE_DISPATCH'
        elif policy not in _names:
            known = ', '.join([*POLICIES, *sorted(_names)])
            raise ValueError(f'MMGATE_DISPATCH={policy!r} is not known; set one of {known}.')
    if name == 'auto':
        chosen = _automatic(op, backends, tensor, None if policy == 'static' else problems, arguments)
    else:
        chosen = find(op, backends, name, source)
        reason = chosen.why_not(tensor)
        if reason is not None:
            usable = [b.name for b in backends if b.why_not(tensor) is None]
            raise ValueError(
                f'{op}: backend {name!r} cannot run here: {reason}. Usable here: {", ".join(usable)}, auto.'
            )
    if not is_traced() and (op, chosen.name) not in _announced:
        _announced.add((op, chosen.name))
        logger.debug('%s runs on backend %r (asked for: %s)', op, chosen.name, name)
    return chosen


def _automatic(
    op: str,
    backends: Sequence[Backend],
    tensor: torch.Tensor,
    problems: Problems | None,
    arguments: tuple[Any, ...],
) -> Backend:
    if is_exporting():
        return next(backend for backend in backends if backend.plain)
    traced = is_traced()
    first = next(b for b in backends if b.in_order and (b.traceable or not traced) and b.why_not(tensor) is None)
    if traced or problems is None:
        return first
    from .measure import choose

    return choose(op, backends, tensor, problems, arguments, first)


def find(op: str, backends: Sequence[Backend], name: Any, source: str = 'backend') -> Backend:
    """Return the backend called ``name``.

    Raises:
        ValueError: There is none of that name; the message lists the names there are.
    """
    for backend in backends:
        if backend.name == name:
            return backend
    names = ', '.join(['auto', *(backend.name for backend in backends)])
    raise ValueError(f'{op}: {source}={name!r} is not a backend; choose one of {names}.')
