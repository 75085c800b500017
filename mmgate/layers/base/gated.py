"""The one way to gate a module: its class becomes a subclass of the host's, and it receives a child ``gate``.

Nothing of the host is copied, taken over or renamed, so that hooks, shards, parametrizations and ties stay what they
were. :func:`switch_off` gives the module its own class back and takes the child out; :func:`switch_on` undoes that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn

from mmgate.layers.base.gate import Gate, Sizes

TENSORS_AND_CHILDREN = ('_parameters', '_buffers', '_modules')
RECORD = 'gating'  # the attribute of a gated module that holds its record


class GatedModule(nn.Module):
    """Base, before a host's class, of the classes that gated modules have; a subclass is the adapter of a host family.

    An adapter overrides ``forward`` with the host's signature and calls its gate there.

    Attributes:
        gate: The child that computes the gate.
        leaves_out: Dotted names of the host's parameters, buffers and children that a gated forward does not use.
            They are out of the module while it is gated.
        old_names: How checkpoints of mmgate 0.1 call what has the host's name now: beginnings of keys.
        host_signature: Whether a gated class keeps the signature of the host's ``forward``, of a family whose
            signatures differ.
    """

    gate: Any
    leaves_out: ClassVar[tuple[str, ...]] = ()
    old_names: ClassVar[Mapping[str, str]] = {}
    host_signature: ClassVar[bool] = False

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Return an attribute of the host, whose class follows in a gated class."""

    @classmethod
    def sizes(cls, host: Any) -> Sizes:
        """Return the sizes of a host's attention, which its gate is made for."""
        raise TypeError(f'{cls.__name__} does not say which sizes its hosts have.')

    @classmethod
    def refuses(cls, host: Any, gate: Any) -> str | None:
        """Return why a gate does not fit a host, or None; a sentence without its full stop."""
        return None

    @classmethod
    def make_gate(cls, host: Any, gate_type: type[Gate], **options: Any) -> nn.Module:
        """Return the gate for a host, on its device and of its dtype.

        Raises:
            ValueError: The gate does not fit; the message says why.
        """
        gate = gate_type(cls.sizes(host), **options)
        reason = cls.refuses(host, gate)
        if reason:
            raise ValueError(f'{reason}.')
        return gate

    def placed(self, model: nn.Module) -> None:
        """Prepare the model around the host; called once, after the module was gated; handles go into the record."""

    def switched_on(self) -> None:
        """Prepare the host for its gate; called after its class was switched."""

    def switched_off(self) -> None:
        """Undo :meth:`switched_on`; called before its class is switched back."""

    def gates(self) -> list[Gate]:
        """Return the gates in the child ``gate``: itself, or one for each direction of a bidirectional attention."""
        return [module for module in self.gate.modules() if isinstance(module, Gate)]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        for key in [key for key in state_dict if key.startswith(prefix)]:
            name = key[len(prefix) :]
            if any(name == left or name.startswith(f'{left}.') for left in self.leaves_out):
                del state_dict[key]
                continue
            new = self.current_name(name)
            if new != name:
                state_dict[prefix + new] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def current_name(self, name: str) -> str:
        """Return the name that a tensor of an older checkpoint has now."""
        for old, new in self.old_names.items():
            if name.startswith(old):
                name = new + name[len(old) :]
                break
        first = name.partition('.')[0]
        own = any(first in getattr(self, kind) for kind in TENSORS_AND_CHILDREN)
        return f'gate.{name}' if not own and first in self.gate_names() else name

    def gate_names(self) -> set[str]:
        """Return the names of what lies directly in the gate."""
        return {name for kind in TENSORS_AND_CHILDREN for name in getattr(self.gate, kind)}

    def __reduce_ex__(self, protocol: Any) -> Any:
        made_of = vars(type(self)).get('made_of')
        if made_of is None:  # a class with a name of its module
            return super().__reduce_ex__(protocol)
        state = self.__getstate__() if hasattr(self, '__getstate__') else vars(self)  # all have it from Python 3.11 on
        return _empty, made_of, state


@dataclass
class Record:
    """What a gated module keeps beside its parameters.

    Attributes:
        adapter: The adapter of the host's family.
        vanilla: The host's class.
        name: The module's name in the model that was swapped.
        rule: The rule that gated it.
        number: The rule's number among all rules of that model.
        child: The path to the module from the one that the rule chose; empty if the rule chose the module itself.
        gate: The child while it is out of the module, else None.
        left_out: What a gated forward does not use, with its place, while it is out of the module.
        notes: What the adapter keeps, by name.
        handles: Of hooks that go with the gate.
    """

    adapter: type[GatedModule]
    vanilla: type[nn.Module]
    name: str
    rule: Mapping[str, Any]
    number: int = 0
    child: str = ''
    gate: nn.Module | None = None
    left_out: list[Part] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)
    handles: list[Any] = field(default_factory=list)

    def chosen_name(self, name: str) -> str:
        """Return the name of the module that the rule chose.

        Args:
            name: The gated module's name in the same model.
        """
        return f'.{name}'.removesuffix(f'.{self.child}')[1:] if self.child else name


@dataclass
class Part:
    """A parameter, buffer or child of a host, and its place.

    Attributes:
        path: Of the module that held it, from the host on; empty for the host.
        kind: Which of a module's three dicts held it.
        name: Its name there.
        value: Itself.
        order: All names in the dict, in their order.
    """

    path: str
    kind: str
    name: str
    value: Any
    order: tuple[str, ...]


_CLASSES: dict[tuple[type[GatedModule], type[nn.Module]], Any] = {}


def gated_class(adapter: type[GatedModule], host: type[nn.Module]) -> type[Any]:
    """Return the class of a gated ``host``: a subclass of both, pickled by them, as it has no name in any module."""
    if (adapter, host) in _CLASSES:
        return _CLASSES[adapter, host]
    members: dict[str, Any] = dict(__module__=adapter.__module__, made_of=(adapter, host))
    if adapter.host_signature:

        @wraps(host.forward)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            return adapter.forward(self, *args, **kwargs)

        members['forward'] = forward
    made: Any = type(f'Gated{host.__name__}', (adapter, host), members)
    return _CLASSES.setdefault((adapter, host), made)


def _empty(adapter: type[GatedModule], host: type[nn.Module]) -> Any:
    kind: Any = gated_class(adapter, host)
    return kind.__new__(kind)


def gate_module(host: nn.Module, adapter: type[GatedModule], gate: nn.Module, record: Record) -> None:
    """Gate ``host`` in place.

    Args:
        host: The module.
        adapter: Of its family.
        gate: The child that it receives, in its mode, on its device and of its dtype.
        record: What the module keeps.
    """
    like = next(host.parameters(), None)
    if like is not None:
        gate.to(device=like.device, dtype=like.dtype)
    gate.train(host.training)
    record.gate = gate
    vars(host)[RECORD] = record
    switch_on(host)


def record_of(module: nn.Module) -> Record | None:
    """Return the record of a module that a rule has gated, whether the gate is on or off, or None."""
    return vars(module).get(RECORD)


def gated_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield name and module of all that rules have gated in ``model``; a shared module once."""
    for name, module in model.named_modules():
        if record_of(module) is not None:
            yield name, module


def host_class(module: nn.Module) -> type[nn.Module]:
    """Return the class that a module has without its gate: its own, if it is not gated in place."""
    made_of = getattr(type(module), 'made_of', None) if is_on(module) else None
    return type(module) if made_of is None else made_of[1]


def current_key(model: nn.Module, key: str) -> str:
    """Return the name in ``model`` of what a checkpoint, maybe one of mmgate 0.1, calls ``key``."""
    for name, module in model.named_modules(remove_duplicate=False):
        prefix = f'{name}.' if name else ''
        if isinstance(module, GatedModule) and key.startswith(prefix):
            return prefix + module.current_name(key[len(prefix) :])
    return key


def is_on(module: nn.Module) -> bool:
    """Return whether a module is gated at present."""
    return isinstance(module, GatedModule)


def switch_on(module: Any) -> None:
    """Let a module that was switched off compute with its gate again."""
    record = module.gating
    if is_on(module):
        return
    module.__class__ = _rebased(type(module), record.vanilla, gated_class(record.adapter, record.vanilla))
    record.left_out = [part for name in module.leaves_out for part in _take_out(module, name)]
    module.add_module('gate', record.gate)
    record.gate = None
    module.switched_on()


def switch_off(module: Any) -> None:
    """Let a gated module compute as the vanilla one; its gate and what it left out change places."""
    record = module.gating
    if not is_on(module):
        return
    module.switched_off()
    record.gate = module._modules.pop('gate')
    for part in reversed(record.left_out):
        _put_back(module, part)
    record.left_out = []
    module.__class__ = _rebased(type(module), gated_class(record.adapter, record.vanilla), record.vanilla)


def remove_gate(module: nn.Module) -> None:
    """Make a gated module the vanilla one for good."""
    switch_off(module)
    for handle in vars(module).pop(RECORD).handles:
        handle.remove()


@contextmanager
def switched_off(*modules: nn.Module) -> Iterator[None]:
    """Let modules compute as the vanilla ones for a while; a mode that they get meanwhile is their gates', too."""
    chosen: list[Any] = [module for module in modules if is_on(module)]
    modes = [module.training for module in chosen]
    for module in chosen:
        switch_off(module)
    try:
        yield
    finally:
        for module, mode in zip(chosen, modes, strict=True):
            if module.training != mode:
                module.gating.gate.train(module.training)
            switch_on(module)


def _rebased(kind: type[Any], old: type[Any], new: type[Any]) -> type[Any]:
    """Return ``kind`` with ``new`` for its base ``old``: parametrizations and FSDP derive classes from a module's."""
    if kind is old:
        return new
    bases = tuple(_rebased(base, old, new) if issubclass(base, old) else base for base in kind.__bases__)
    members = {name: value for name, value in vars(kind).items() if name not in ('__dict__', '__weakref__')}
    return type(kind.__name__, bases, members)


def _take_out(host: nn.Module, name: str) -> list[Part]:
    """Take a part of a dotted name out of ``host`` and return it; nothing if the host has none."""
    path, _, leaf = name.rpartition('.')
    holder = host.get_submodule(path)
    for kind in TENSORS_AND_CHILDREN:
        parts = getattr(holder, kind)
        if leaf in parts:
            return [Part(path, kind, leaf, order=tuple(parts), value=parts.pop(leaf))]
    return []


def _put_back(host: nn.Module, part: Part) -> None:
    """Put a part back where it was, in its order, on the device and of the dtype that the host has by now."""
    like = next(host.parameters(), None)
    parts = getattr(host.get_submodule(part.path), part.kind)
    parts[part.name] = part.value if like is None else _followed(part, like)
    for name in [name for name in part.order if name in parts]:
        parts[name] = parts.pop(name)


def _followed(part: Part, like: Tensor) -> Any:
    """Return what was out of a model where the model is by now; itself, unless the one of both was on ``meta``."""
    holder = nn.Module()
    held = getattr(holder, part.kind)
    held[part.name] = part.value
    if any(tensor.is_meta for tensor in (*holder.parameters(), *holder.buffers())) and not like.is_meta:
        holder.to_empty(device=like.device)
    holder.to(device=like.device, dtype=like.dtype)
    return held[part.name]
