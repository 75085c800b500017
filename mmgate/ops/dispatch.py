"""Choosing the implementation of an operator.

Every operator has an ordered tuple of :class:`Backend`. ``auto`` takes the first that can run on the inputs; a name
asks for exactly that one, and raises with the reason when it cannot run. All backends compute the same function, so
the choice changes speed and memory alone.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .library import is_compiling

logger = logging.getLogger('mmgate')
_announced: set[tuple[str, str]] = set()


@dataclass(frozen=True)
class Backend:
    """One implementation of an operator.

    Attributes:
        name: What a config, an argument or the environment variable calls it.
        why_not: Takes the operator's first tensor and returns why this backend cannot run on it, or None if it can.
        run: The implementation.
    """

    name: str
    why_not: Callable[[torch.Tensor], str | None]
    run: Callable[..., torch.Tensor]


def select(op: str, backends: Sequence[Backend], tensor: torch.Tensor, requested: str | None = None) -> Backend:
    """Return the backend of ``op`` that runs on ``tensor``.

    The order of precedence is the environment variable ``MMGATE_<OP>`` (``MMGATE_MS_DEFORM_ATTN=torch``), then
    ``requested``, then ``auto``.

    Args:
        op: The operator's name.
        backends: What there is, the preferred first.
        tensor: The input whose device and dtype decide.
        requested: A backend's name, ``'auto'`` or None, which means ``'auto'``.

    Raises:
        ValueError: An unknown name, or the backend asked for cannot run on ``tensor``; the message gives the reason.
    """
    variable = f'MMGATE_{op.upper()}'
    from_environment = os.environ.get(variable)
    name = from_environment or requested or 'auto'
    if name == 'auto':
        chosen = next(backend for backend in backends if backend.why_not(tensor) is None)
    else:
        chosen = find(op, backends, name, variable if from_environment else 'backend')
        reason = chosen.why_not(tensor)
        if reason is not None:
            usable = [b.name for b in backends if b.why_not(tensor) is None]
            raise ValueError(
                f'{op}: backend {name!r} cannot run here: {reason}. Usable here: {", ".join(usable)}, auto.'
            )
    if not is_compiling() and (op, chosen.name) not in _announced:
        _announced.add((op, chosen.name))
        logger.debug('%s runs on backend %r (asked for: %s)', op, chosen.name, name)
    return chosen


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
