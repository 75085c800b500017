"""Table that finds the adapter for a class of gates and the class of an attention module (the host)."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import nn

from mmgate import _environment
from mmgate._environment import log
from mmgate.adapter import Adapter, host_class
from mmgate.errors import full_name
from mmgate.gate import Gate, gate_of_type, registered_gates

Host = type[nn.Module] | str
# The packages for whose attention a file of this name has adapters.
PACKAGES = frozenset(('mmcv', 'mmdet', 'mmpretrain', 'mmseg', 'projects', 'timm', 'torch', 'transformers'))


@dataclass(frozen=True)
class Holder:
    """Table entry of a module that holds the attention to be gated, such as mmcv's around torch's.

    Attributes:
        attention: Name of the child that is the attention.
    """

    attention: str


_ADAPTERS: dict[tuple[type, type | str], type[Adapter] | Holder] = {}


def adapts(
    gate: type[nn.Module], *hosts: Host, like: type[nn.Module] | None = None
) -> Callable[[type[Adapter]], type[Adapter]]:
    """Register an adapter for one or more attention classes (hosts), as a decorator of the adapter.

    It decorates the adapter, a subclass of :class:`~mmgate.adapter.Adapter` whose ``forward`` has the
    host's signature and calls the gate. With ``like`` there is nothing to decorate: ``adapts(Gate, Sub, like=Base)``
    declares that ``Sub`` computes the same as ``Base``.

    Args:
        gate: Class of gates, or an attention that a rule names by its type. The adapter serves its subclasses, too,
            unless they have adapters themselves.
        hosts: Host classes. They match exactly: a subclass may compute something else. A class that cannot be imported
            everywhere is given by its dotted name. Leading packages may be left out: ``'vit.Attention'`` is also
            ``projects.ViTDet.vitdet.vit.Attention``.
        like: A host class whose adapter serves ``hosts``, too.

    Raises:
        TypeError: An argument is neither a class nor a dotted name, or there is no host.
        LookupError: ``gate`` has no adapter for ``like``.
    """
    gate_class: Any = gate_of_type(gate) or gate
    if not hosts:
        raise TypeError('adapts needs a host class, or its dotted name.')
    for cls in (gate_class, *hosts, gate_class if like is None else like):
        if not inspect.isclass(cls) and not (isinstance(cls, str) and cls in hosts):
            raise TypeError(f'adapts needs classes, got {cls!r}.')
        if isinstance(cls, str) and not all('.' in cls and part for part in cls.split('.')):
            raise TypeError(f'{cls!r} is no dotted name of a host class, such as vitdet.vit.Attention.')

    def register(adapter: Any) -> Any:
        # mmgate's own adapters come first, so that a later one takes their place.
        if not adapter.__module__.startswith('mmgate.'):
            for host in filter(inspect.isclass, hosts):
                import_adapters(host)  # type: ignore[arg-type]
        _ADAPTERS.update({(gate_class, host): adapter for host in hosts})
        return adapter

    if like is not None:
        base: Any = like
        import_adapters(base)
        known = _entry(gate_class, like)
        if known is None:
            fits = ', '.join(host_names(gate_class)) or 'nothing'
            raise LookupError(f'{full_name(gate)} has no adapter for {full_name(like)}; it replaces {fits}.')
        register(known)
    return register


def adapts_inside(gate: type[nn.Module], attention: str, *hosts: Host) -> None:
    """Register classes that hold attention: a rule that names one gates its child ``attention`` instead."""
    adapts(gate, *hosts)(Holder(attention))  # type: ignore[arg-type]


def adapter_for(gate: type[Gate], host: nn.Module) -> tuple[type[Adapter], str] | None:
    """Find the adapter that lets a gate into a module; return it and the path of the module to gate, or None.

    The host's class has to match exactly: a subclass may compute something else, which a gate would lose in silence.

    Args:
        gate: Class of the gate.
        host: A module. The path from it is empty if it is gated itself.
    """
    known: Any = type(host)
    import_adapters(known)
    entry = _entry(gate, type(host))
    if isinstance(entry, Holder):
        inner = adapter_for(gate, host.get_submodule(entry.attention))
        return None if inner is None else (inner[0], f'{entry.attention}.{inner[1]}'.rstrip('.'))
    return None if entry is None else (entry, '')


def held_attention(host: nn.Module, *, exactly: bool = False) -> Iterator[tuple[str, nn.Module]]:
    """Yield name and module of each attention in a module that a rule gates instead of that module.

    Args:
        host: A module, gated or not.
        exactly: True leaves out subclasses of registered hosts, into which a rule puts no gate by this module's name.
    """
    vanilla: Any = host_class(host)
    import_adapters(vanilla)
    children = dict(host.named_children())
    found: dict[str, nn.Module] = {}
    for (gate_class, known), entry in _ADAPTERS.items():
        if not isinstance(entry, Holder) or entry.attention not in children:
            continue
        derived = inspect.isclass(known) and isinstance(host, known) and not exactly
        if derived or _entry(gate_class, vanilla) == entry:
            found[entry.attention] = children[entry.attention]
    yield from found.items()


def gates_for(host: nn.Module) -> list[Any]:
    """Return what is registered, see :func:`registered_gates`, and may be a rule's ``type`` for this module."""
    return [one for one in registered_gates() if adapter_for(gate_of_type(one), host) is not None]  # type: ignore[arg-type]


def adapted_base(gate: type[Gate], host: type) -> type | None:
    """Return the nearest base of a class into which a gate fits, or None."""
    return next((base for base in host.__mro__[1:] if _entry(gate, base) is not None), None)


def host_names(gate: type) -> list[str]:
    """Return the names of all attention classes, of packages that are imported, into which a gate fits."""
    for package in PACKAGES & sys.modules.keys():
        _import_file(package)
    hosts = dict.fromkeys(host for base, host in _ADAPTERS if base in gate.__mro__)
    return [host if isinstance(host, str) else full_name(host) for host in hosts]


@cache
def import_adapters(host: Any) -> None:
    """Import the adapters that may fit an attention class: those for the packages of its bases."""
    packages = {base.__module__.partition('.')[0] for base in host.__mro__}
    for package in packages & PACKAGES:
        _import_file(package)


@cache
def _import_file(package: str) -> None:
    """Import the file with the adapters for a package, which may take seconds, as the package does."""
    problem = _environment.why_not(f'{__package__}.{package}')
    # A package may be too old, for instance: mm's models of language hold modules of any transformers.
    if problem:
        log(f'mmgate has no adapters for {package} here: {problem}')


def _entry(gate: type, host: type) -> type[Adapter] | Holder | None:
    """Return the entry of a gate's class or its nearest base, for a host's class or the end of its dotted name."""
    path = f'.{full_name(host)}'
    names = [name for _, name in _ADAPTERS if isinstance(name, str) and path.endswith(f'.{name}')]
    keys: list[type | str] = [host, *sorted(set(names), key=len, reverse=True)]
    pairs = ((base, key) for base in gate.__mro__ for key in keys)
    return next((_ADAPTERS[pair] for pair in pairs if pair in _ADAPTERS), None)
