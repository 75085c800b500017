"""The table of pairs: a gate, the host class that it can replace, and how it takes over the host's sizes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import cache

from torch import nn

from mmgate._environment import log, why_not
from mmgate.registry import MODELS

Adapter = Callable[..., nn.Module]
Host = type[nn.Module] | str
LATE = ('timm', 'transformers')
_ADAPTERS: dict[tuple[type, type | str], Adapter] = {}


def adapts(gate: type[nn.Module], *hosts: Host, like: type[nn.Module] | None = None) -> Callable[[Adapter], Adapter]:
    """Say how ``gate`` replaces modules of the classes ``hosts``.

    As a decorator it registers a function ``(gate class, host module, **options) -> gate module`` that takes over the
    host's sizes. The gate has to keep the host's parameter names; the swap fills them with the host's values. With
    ``like`` there is nothing to decorate: ``adapts(Gate, Sub, like=Base)`` says that ``Sub`` computes what ``Base``
    does.

    Args:
        gate: The gate; its subclasses are served, too, unless one has an adapter of its own.
        hosts: Host classes. They match exactly: a subclass may compute something else. One that need not be
            importable here is given by its dotted name, of which leading packages may be left out: ``'vit.Attention'``
            is also ``projects.ViTDet.vitdet.vit.Attention``.
        like: A host class whose adapter serves ``hosts`` as well.

    Raises:
        TypeError: Something else than a class or a dotted name.
        LookupError: ``gate`` has no adapter for ``like``.
    """
    for cls in (gate, *hosts, gate if like is None else like):
        if not inspect.isclass(cls) and not (isinstance(cls, str) and cls in hosts):
            raise TypeError(f'adapts needs classes, got {cls!r}.')
        if isinstance(cls, str) and not all('.' in cls and part for part in cls.split('.')):
            raise TypeError(f'{cls!r} is no dotted name of a host class, such as vitdet.vit.Attention.')

    def register(adapter: Adapter) -> Adapter:
        _ADAPTERS.update({(gate, host): adapter for host in hosts})
        return adapter

    if like is not None:
        known = _adapter(gate, like)
        if known is None:
            fits = ', '.join(host_names(gate)) or 'nothing'
            raise LookupError(f'{full_name(gate)} has no adapter for {full_name(like)}; it replaces {fits}.')
        register(known)
    return register


def adapter_for(gate: type, host: nn.Module) -> Adapter | None:
    """Return the adapter that replaces ``host`` by a ``gate``, or None.

    The host's class has to match exactly: a subclass may compute something else, which a swap would lose in silence.
    """
    _import_late(type(host).__module__.partition('.')[0])
    return _adapter(gate, type(host))


def gates_for(host: nn.Module) -> list[type]:
    """Return the registered gates that can replace ``host``."""
    _import_late(type(host).__module__.partition('.')[0])
    return [gate for gate in registered_gates() if _adapter(gate, type(host))]


def hosts_of(gate: type) -> list[type]:
    """Return the host classes that ``gate`` can replace, without those that are known by name only."""
    return [host for host in _hosts(gate) if not isinstance(host, str)]


def host_names(gate: type) -> list[str]:
    """Return the names of all host classes that ``gate`` can replace; empty if it is no gate."""
    return [host if isinstance(host, str) else full_name(host) for host in _hosts(gate)]


def parameters_of(gate: type) -> dict[str, inspect.Parameter]:
    """Return what a gate's constructor takes by name; behind ``**kwargs`` stand the arguments of the next class."""
    found: dict[str, inspect.Parameter] = {}
    for cls in getattr(gate, 'core', gate).__mro__:
        if '__init__' in vars(cls):
            taken = inspect.signature(cls).parameters
            found = {**taken, **found}
            if all(one.kind is not one.VAR_KEYWORD for one in taken.values()):
                break
    return {name: one for name, one in found.items() if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)}


def full_name(cls: type) -> str:
    """Return a class's name with its module: mmdet and mmseg have classes of one name."""
    return f'{cls.__module__}.{cls.__qualname__}'


def _hosts(gate: type) -> Iterator[type | str]:
    yield from dict.fromkeys(host for base, host in _ADAPTERS if base in gate.__mro__)


@cache
def _import_late(package: str) -> None:
    """Import the adapters of a package that nothing here imports, once a module of it is met."""
    problem = why_not(f'{__package__}.{package}') if package in LATE else None
    if problem:  # too old, for instance: mm models of language hold modules of any transformers
        log(f'mmgate has no adapters for {package} here: {problem}')


def _adapter(gate: type, host: type) -> Adapter | None:
    path = f'.{full_name(host)}'
    names = [name for _, name in _ADAPTERS if isinstance(name, str) and path.endswith(f'.{name}')]
    keys: list[type | str] = [host, *sorted(set(names), key=len, reverse=True)]
    pairs = ((base, key) for base in gate.__mro__ for key in keys)
    return next((_ADAPTERS[pair] for pair in pairs if pair in _ADAPTERS), None)


def registered_gates() -> Iterator[type]:
    """Yield the gates that have a name in the registry."""
    for registered in MODELS.module_dict.values():
        if inspect.isclass(registered) and any(base in registered.__mro__ for base, _ in _ADAPTERS):
            yield registered
