"""The table of pairs: a kind of gate, a host's class, and the adapter of the host's family."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import nn

from mmgate._environment import log, why_not
from mmgate.layers.base.gate import Gate
from mmgate.layers.base.gated import GatedModule, host_class
from mmgate.registry import MODELS

Host = type[nn.Module] | str
Adapter = type[GatedModule]
LATE = ('timm', 'transformers')


@dataclass(frozen=True)
class Inside:
    """An entry for a host whose attention is a child, which is gated instead.

    Attributes:
        child: Its name.
    """

    child: str


_ADAPTERS: dict[tuple[type, type | str], Adapter | Inside] = {}


def adapts(gate: type[nn.Module], *hosts: Host, like: type[nn.Module] | None = None) -> Callable[[Adapter], Adapter]:
    """Say how modules of the classes ``hosts`` are gated.

    As a decorator it enters an adapter, a subclass of :class:`~mmgate.layers.base.gated.GatedModule` whose
    ``forward`` has the host's signature and calls the gate. With ``like`` there is nothing to decorate:
    ``adapts(Gate, Sub, like=Base)`` says that ``Sub`` computes what ``Base`` does.

    Args:
        gate: The gate, or what a rule names; its subclasses are served, too, unless one has an adapter itself.
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
    kind = gate_of_type(gate) or gate

    def register(adapter: Any) -> Any:
        _ADAPTERS.update({(kind, host): adapter for host in hosts})
        return adapter

    if like is not None:
        known = _adapter(kind, like)
        if known is None:
            fits = ', '.join(host_names(gate)) or 'nothing'
            raise LookupError(f'{full_name(gate)} has no adapter for {full_name(like)}; it replaces {fits}.')
        register(known)
    return register


def adapts_inside(gate: type[nn.Module], child: str, *hosts: Host) -> None:
    """Say that modules of the classes ``hosts`` are gated in their child of that name."""
    adapts(gate, *hosts)(Inside(child))  # type: ignore[arg-type]


def gate_of_type(kind: Any) -> type[Gate] | None:
    """Return the gate's class that a rule's type names: itself, or that of the attention of that name; else None."""
    found = getattr(kind, 'gate_type', kind)
    return found if inspect.isclass(found) and issubclass(found, Gate) else None


def adapter_for(kind: type, host: nn.Module) -> tuple[Adapter, str] | None:
    """Return the adapter that lets a gate of ``kind`` into ``host``, and where: a child's name, or '' for the host.

    The host's class has to match exactly: a subclass may compute something else, which a gate would lose in silence.
    """
    _import_late(type(host).__module__.partition('.')[0])
    entry = _adapter(gate_of_type(kind) or kind, type(host))
    if isinstance(entry, Inside):
        inner = adapter_for(kind, host.get_submodule(entry.child))
        return None if inner is None else (inner[0], f'{entry.child}.{inner[1]}'.rstrip('.'))
    return None if entry is None else (entry, '')


def held_attention(host: nn.Module, *, exactly: bool = False) -> Iterator[tuple[str, nn.Module]]:
    """Yield name and module of the attention in ``host`` that gates go into instead of the host.

    Args:
        host: A module, gated or not.
        exactly: Whether instances of a subclass of a known class do not count. Gates do not fit them, but mmgate's own
            attentions derive from mmcv's.
    """
    vanilla = host_class(host)
    children = dict(host.named_children())
    found: dict[str, nn.Module] = {}
    for (kind, known), entry in _ADAPTERS.items():
        if not isinstance(entry, Inside) or entry.child not in children:
            continue
        derived = inspect.isclass(known) and isinstance(host, known) and not exactly
        if derived or _adapter(kind, vanilla) == entry:
            found[entry.child] = children[entry.child]
    yield from found.items()


def gates_for(host: nn.Module) -> list[type]:
    """Return what rules may name as ``type`` for ``host``."""
    return [kind for kind in registered_gates() if adapter_for(kind, host) is not None]


def hosts_of(kind: type) -> list[type]:
    """Return the host classes that a gate of ``kind`` has an adapter for, less those that are known by name."""
    return [host for host in _hosts(kind) if not isinstance(host, str)]


def host_names(kind: type) -> list[str]:
    """Return the names of all host classes that a gate of ``kind`` has an adapter for; empty if it is no gate."""
    return [host if isinstance(host, str) else full_name(host) for host in _hosts(kind)]


def options_of(kind: type) -> dict[str, inspect.Parameter]:
    """Return the options of a gate, its keyword-only arguments, those of its bases after ``**kwargs`` among them."""
    found: dict[str, inspect.Parameter] = {}
    for cls in (gate_of_type(kind) or kind).__mro__:
        if '__init__' in vars(cls):
            taken = inspect.signature(cls).parameters
            found = {**{name: one for name, one in taken.items() if one.kind is one.KEYWORD_ONLY}, **found}
            if all(one.kind is not one.VAR_KEYWORD for one in taken.values()):
                break
    return found


def full_name(cls: type) -> str:
    """Return a class's name with its module: mmdet and mmseg have classes of one name."""
    return f'{cls.__module__}.{cls.__qualname__}'


def registered_gates() -> Iterator[type]:
    """Yield what rules may name: the registered classes with a gate."""
    for registered in MODELS.module_dict.values():
        if gate_of_type(registered) is not None:
            yield registered


def _hosts(kind: type) -> Iterator[type | str]:
    bases = (gate_of_type(kind) or kind).__mro__
    yield from dict.fromkeys(host for base, host in _ADAPTERS if base in bases)


@cache
def _import_late(package: str) -> None:
    """Import the adapters of a package that nothing here imports, once a module of it is met."""
    problem = why_not(f'{__package__}.{package}') if package in LATE else None
    if problem:  # too old, for instance: mm models of language hold modules of any transformers
        log(f'mmgate has no adapters for {package} here: {problem}')


def _adapter(kind: type, host: type) -> Adapter | Inside | None:
    path = f'.{full_name(host)}'
    names = [name for _, name in _ADAPTERS if isinstance(name, str) and path.endswith(f'.{name}')]
    keys: list[type | str] = [host, *sorted(set(names), key=len, reverse=True)]
    pairs = ((base, key) for base in kind.__mro__ for key in keys)
    return next((_ADAPTERS[pair] for pair in pairs if pair in _ADAPTERS), None)
