"""The table of pairs: a gate, the host class that it can replace, and how it takes over the host's sizes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator

from torch import nn

from mmgate.registry import MODELS

Adapter = Callable[..., nn.Module]
_ADAPTERS: dict[tuple[type, type], Adapter] = {}


def adapts(gate: type[nn.Module], *hosts: type[nn.Module]) -> Callable[[Adapter], Adapter]:
    """Register a function ``(gate class, host module, **options) -> gate module`` for every class in ``hosts``.

    It serves ``gate`` and its subclasses, unless one has an adapter of its own. The gate has to keep the host's
    parameter names; the swap fills them with the host's values.
    """

    def register(adapter: Adapter) -> Adapter:
        for host in hosts:
            _ADAPTERS[gate, host] = adapter
        return adapter

    return register


def adapter_for(gate: type, host: nn.Module) -> Adapter | None:
    """Return the adapter that replaces ``host`` by a ``gate``, or None.

    The host's class has to match exactly: a subclass may compute something else, which a swap would lose in silence.
    """
    return _adapter(gate, type(host))


def gates_for(host: nn.Module) -> list[type]:
    """Return the registered gates that can replace ``host``."""
    return [gate for gate in _gates() if _adapter(gate, type(host))]


def hosts_of(gate: type) -> list[type]:
    """Return the host classes that ``gate`` can replace; empty if it is no gate."""
    hosts = dict.fromkeys(host for _, host in _ADAPTERS)
    return [host for host in hosts if _adapter(gate, host)]


def gate_names() -> list[str]:
    """Return the names of the registered gates."""
    return [gate.__name__ for gate in _gates()]


def _adapter(gate: type, host: type) -> Adapter | None:
    return next((_ADAPTERS[base, host] for base in gate.__mro__ if (base, host) in _ADAPTERS), None)


def _gates() -> Iterator[type]:
    for registered in MODELS.module_dict.values():
        if inspect.isclass(registered) and any(base in registered.__mro__ for base, _ in _ADAPTERS):
            yield registered
