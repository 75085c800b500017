"""Gate a module in place: its class becomes a subclass of its former class, and it receives a child ``gate``.

Nothing of the host is copied or renamed, so that hooks, shards, parametrizations and ties stay as they were.
:func:`switch_off` gives the module the host's class back and takes the child out; :func:`switch_on` undoes that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial, wraps
from itertools import chain
from types import CellType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, SupportsIndex

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from mmgate.layers.base.gate import CHILD, Gate, Sizes, StateDict

# The dicts of a module that hold its parameters, buffers and children.
TENSORS_AND_CHILDREN = ('_parameters', '_buffers', '_modules')
# The dtypes in which layers compute; quantised weights are stored in others.
COMPUTED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# The attribute of a gated module that holds its record.
RECORD = 'gating'


class Handle(Protocol):
    """Protocol of a hook's handle, as torch returns it."""

    def remove(self) -> None:
        """Remove the hook from its module."""


class GatedModule(nn.Module):
    """Base class of adapters; an adapter lets gates into one family of attention modules (hosts).

    An adapter overrides ``forward`` with the host's signature and calls its gate there. The class of a gated module
    derives from the adapter and, after it, from the host's class, so that ``self`` has all attributes of the host.

    Attributes:
        gate: Child that computes the gate.
        leaves_out: Dotted names of the host's parameters, buffers and children that a gated forward does not use.
            They are out of the module while it is gated.
        host_signature: True if a gated class shows the signature of its host's ``forward``, for a family whose
            signatures differ.
        own_gates: What to do about hosts that were built with a gate of their package.
        vits: Patterns of packages, modules and classes of vision transformers, each for one part of a dotted name, with
            ``*`` for any letters. A host is in a vision transformer if a pattern matches its class or that of a module
            around it.
    """

    gate: Any
    leaves_out: ClassVar[tuple[str, ...]] = ()
    host_signature: ClassVar[bool] = False
    own_gates: ClassVar[str] = ''
    vits: ClassVar[tuple[str, ...]] = ('backbones', 'mmpretrain', 'timm')

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Return an attribute of the host; for type checkers, since the host's class is a base as well."""

    # An adapter gives its host the type that it reads, a class or a Protocol, and its gate the class of its kind.
    @classmethod
    def sizes(cls, host: Any) -> Sizes:
        """Read channels, heads and other sizes off an attention module (the host), for its gate."""
        raise TypeError(f'{cls.__name__} does not say which sizes its hosts have.')

    @classmethod
    def recognises(cls, kind: type[nn.Module]) -> bool:
        """Return True if modules of a class are hosts by their code, for an adapter registered without names."""
        return False

    @classmethod
    def check_host(cls, host: Any) -> None:
        """Raise ConfigError if an attention module computes something that this adapter's ``forward`` does not."""

    @classmethod
    def check_gate(cls, host: Any, gate: Any) -> None:
        """Raise ConfigError if a gate does not fit an attention module (the host)."""

    @classmethod
    def is_in_vit(cls, around: Iterable[type]) -> bool:
        """Return True if a host is part of a vision transformer, whose authors start linear layers in their own way.

        DeiT, GCViT, Swin, PVT and others draw every linear layer from a normal distribution of deviation 0.02.
        Detectors have torch's and mmcv's attention, too. It is part of a vision transformer if it lies in a backbone.

        Args:
            around: Classes of the host and of the modules around it.
        """
        parts = {part for kind in around for part in f'{kind.__module__}.{kind.__qualname__}'.split('.')}
        return any(fnmatchcase(part, vit) for part in parts for vit in cls.vits)

    @classmethod
    def make_gate(
        cls, host: Any, gate_type: type[Gate], surroundings: Mapping[str, Any] | None = None, /, **options: object
    ) -> nn.Module:
        """Make a gate of class ``gate_type`` for an attention module (the host) and return it.

        Args:
            host: Module to be gated.
            gate_type: Class of the gate.
            surroundings: The :class:`~mmgate.layers.base.gate.Sizes` that the model around the host tells, by name.
            **options: Options of the gate.

        Raises:
            ConfigError: The gate does not fit; the message says why.
            ValueError: The gate's constructor refuses an option.
        """
        cls.check_host(host)
        gate = cls.build_gate(replace(cls.sizes(host), **(surroundings or {})), gate_type, **options)
        cls.check_gate(host, gate)
        return gate

    @classmethod
    def build_gate(cls, sizes: Sizes, gate_type: type[Gate], **options: Any) -> nn.Module:
        """Build a gate, or several in a module, for a host of these sizes; :meth:`make_gate` checks the host before."""
        return gate_type(sizes, **options)

    def after_gating(self, model: nn.Module) -> None:
        """Prepare the model around the module, for instance with hooks; called once, when a rule gates the module.

        Handles of hooks go into the record.
        """

    def after_switch_on(self) -> None:
        """Prepare the module for its gate; called each time right after the module has got the gated class."""

    def before_switch_off(self) -> None:
        """Undo what :meth:`after_switch_on` has prepared; called right before the module gets its former class back."""

    def gates(self) -> list[Gate]:
        """Return the module's gates: its child ``gate``, or the two in it if the attention goes both ways."""
        return [module for module in self.gate.modules() if isinstance(module, Gate)]

    def _load_from_state_dict(self, state_dict: StateDict, prefix: str, *args: object, **kwargs: object) -> None:
        for key in [key for key in state_dict if key.startswith(prefix)]:
            name = key[len(prefix) :]
            if any(name == left or name.startswith(f'{left}.') for left in self.leaves_out):
                del state_dict[key]
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        made_of = vars(type(self)).get('made_of')
        # A class that a file defines is found by its name.
        if made_of is None:
            return super().__reduce_ex__(protocol)
        # Every object has __getstate__ from Python 3.11 on.
        state = self.__getstate__() if hasattr(self, '__getstate__') else vars(self)
        return _new_instance, made_of, state


@dataclass
class Record:
    """Record that a gated module keeps, with all that is needed to switch its gate off or remove it.

    Attributes:
        adapter: Adapter of the host's family.
        vanilla: Class of the host.
        name: Name of the module in the model that was swapped.
        rule: Rule that gated it.
        number: Number of the rule among all rules of that model.
        child: Path to the module from the one that the rule chose; empty if the rule chose the module itself.
        gate: The child while it is out of the module, else None.
        left_out: The parts of the host that a gated forward does not use, while they are out of the module.
        notes: Values that the adapter keeps, by name.
        hidden: The host's attribute of the child's name, while the child is in the module. timm's is None.
        handles: Handles of the hooks that are removed with the gate.
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
    hidden: dict[str, Any] = field(default_factory=dict)
    handles: list[Handle] = field(default_factory=list)

    def chosen_name(self, name: str) -> str:
        """Return the name of the module that the rule named, which may be a wrapper around the gated one.

        Args:
            name: The gated module's name in the same model.
        """
        return f'.{name}'.removesuffix(f'.{self.child}')[1:] if self.child else name


@dataclass
class Part:
    """A parameter, buffer or child that is out of a gated module, with the place to which it returns.

    Attributes:
        path: Path, from the host on, of the module that held it; empty for the host.
        kind: Name of the module's dict that held it, one of :data:`TENSORS_AND_CHILDREN`.
        name: Name in that dict.
        value: The parameter, buffer or child.
        order: All names in the dict, in their order.
    """

    path: str
    kind: str
    name: str
    value: Tensor | nn.Module | None
    order: tuple[str, ...]


_CLASSES: dict[tuple[type[GatedModule], type[nn.Module]], type[Any]] = {}


def gated_class(adapter: type[GatedModule], host: type[nn.Module]) -> type[Any]:
    """Return the class that modules of the class ``host`` get while they are gated: a subclass of adapter and host.

    It is made once for each pair. Its instances are pickled by the pair, because no module has a name for it.
    """
    if (adapter, host) in _CLASSES:
        return _CLASSES[adapter, host]

    # An adapter may override another method than the host's forward, as timm's Swin block has one for its attention.
    own = any('forward' in vars(base) for base in adapter.__mro__[: adapter.__mro__.index(GatedModule)])

    @wraps(adapter.forward if own and not adapter.host_signature else host.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self, adapter):
            # torch.fx cannot look into a gate, whose code depends on sizes. As torch's attention, it is one node.
            for given in (*args, *kwargs.values()):
                if isinstance(given, Proxy):
                    tracer: Any = given.tracer
                    return tracer.create_proxy('call_module', tracer.path_of_module(self), args, kwargs)
            return (adapter if own else host).forward(self, *args, **kwargs)
        # A function that was put around this method calls it while the gate is off or removed, too.
        return type(self).forward(self, *args, **kwargs)

    members: dict[str, Any] = dict(__module__=__name__, made_of=(adapter, host), forward=forward)
    members['__doc__'] = f'{host.__module__}.{host.__qualname__} with a gate, called by {adapter.__qualname__}.forward.'
    made = type(f'Gated{host.__name__}', (adapter, host), members)
    return _CLASSES.setdefault((adapter, host), made)


def _new_instance(adapter: type[GatedModule], host: type[nn.Module]) -> GatedModule:
    """Return an instance of a gated class without its state, which pickle sets; pickles name this function."""
    kind: Any = gated_class(adapter, host)
    return kind.__new__(kind)


def gate_module(host: nn.Module, adapter: type[GatedModule], gate: nn.Module, record: Record) -> None:
    """Gate a module in place: give it a gate as a child, and a class whose ``forward`` calls the gate.

    Args:
        host: Module to be gated.
        adapter: Adapter of its family.
        gate: Child that it receives, on the host's device; it gets the host's mode.
        record: Record that the module keeps.
    """
    gate.train(host.training)
    record.gate = gate
    vars(host)[RECORD] = record
    switch_on(host)


def computed_dtype(*modules: nn.Module) -> torch.dtype | None:
    """Return the dtype in which modules compute, that of their first floating parameter, else buffer; or None.

    Quantised layers do not count: their weights are integers or have 8 bits, and their scales may have any dtype.
    """
    parts = [part for module in modules for part in module.modules() if not _is_quantised(part)]
    parameters = (tensor for part in parts for tensor in part.parameters(recurse=False))
    buffers = (tensor for part in parts for tensor in part.buffers(recurse=False))
    return next((tensor.dtype for tensor in chain(parameters, buffers) if tensor.dtype in COMPUTED), None)


def _is_quantised(part: nn.Module) -> bool:
    """Return True if a module, without its children, keeps numbers of 8 bits."""
    own = chain(part.parameters(recurse=False), part.buffers(recurse=False))
    return any(tensor.dtype.itemsize == 1 and tensor.dtype != torch.bool for tensor in own)


def device_of(*modules: nn.Module) -> torch.device | None:
    """Return the device of the first parameter or buffer of modules, or None."""
    tensors = (tensor for module in modules for tensor in (*module.parameters(), *module.buffers()))
    return next((tensor.device for tensor in tensors), None)


def record_of(module: nn.Module) -> Record | None:
    """Return the record of a gated module, whether its gate is on or off; None for a module that no rule has gated."""
    return vars(module).get(RECORD)


def gated_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield name and module for each module of a model that a rule has gated, also while its gate is off.

    A shared module comes once.

    A module has the host's class while its gate is off, and the gated class while it is on.
    """
    for name, module in model.named_modules():
        if record_of(module) is not None:
            yield name, module


def host_class(module: nn.Module) -> type[nn.Module]:
    """Return the class that a module has without its gate; for a module that is not gated, its own class."""
    made_of = getattr(type(module), 'made_of', None) if is_on(module) else None
    return type(module) if made_of is None else made_of[1]


def is_on(module: nn.Module) -> bool:
    """Return True if a module has a gate and the gate is switched on."""
    return isinstance(module, GatedModule)


def switch_on(module: Any) -> None:
    """Switch the gate of a module on again: it gets the gated class and its child ``gate``."""
    record = module.gating
    if is_on(module):
        return
    _set_class(module, record.vanilla, gated_class(record.adapter, record.vanilla))
    record.left_out = [part for name in module.leaves_out for part in _take_out(module, name)]
    if CHILD in vars(module):
        record.hidden[CHILD] = vars(module).pop(CHILD)
    module.add_module(CHILD, record.gate)
    record.gate = None
    module.after_switch_on()


def switch_off(module: Any) -> None:
    """Switch the gate of a module off: the module gets its former class and parts back, and the gate is taken out."""
    record = module.gating
    if not is_on(module):
        return
    module.before_switch_off()
    record.gate = module._modules.pop(CHILD)
    vars(module).update(record.hidden)
    record.hidden = {}
    for part in reversed(record.left_out):
        _put_back(module, part)
    record.left_out = []
    _set_class(module, gated_class(record.adapter, record.vanilla), record.vanilla)


def remove_gate(module: nn.Module) -> None:
    """Remove the gate of a module for good, with its record and hooks, so that the module is vanilla again."""
    switch_off(module)
    for handle in vars(module).pop(RECORD).handles:
        handle.remove()


@contextmanager
def switched_off(*modules: nn.Module) -> Iterator[None]:
    """Switch the gates of modules off inside a ``with`` block, and on again afterwards.

    A change of training or eval mode in the block reaches the gates, too.
    """
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


def bypass_of(host: nn.Module, adapter: type[GatedModule]) -> str | None:
    """Return the reason why a gate would not be called in a module, or None.

    A method that was set on the instance hides the gated class's method. That does no harm if it is a method of the
    host's class, or if it calls one by an attribute of the module, as accelerate's hooks do.

    Args:
        host: Module to be gated.
        adapter: Adapter of its family.
    """
    hooked = any('_hf_hook' in vars(part) for part in host.modules())
    if hooked and any(parameter.is_meta for parameter in host.parameters()):
        return (
            "accelerate has offloaded its weights, and would not fetch the gate's; gate the model before that, and "
            f"name the gated class in accelerate's preload_module_classes=['Gated{type(host).__name__}']"
        )
    kept = _kept_methods(host, adapter)
    for name in sorted(_methods(adapter) & vars(host).keys() - kept.keys()):
        found = vars(host)[name]
        function = found
        if isinstance(found, partial) and found.args[:1] == (host,):
            function = found.func
        elif isinstance(found, MethodType) and found.__self__ is host:
            function = found.__func__
        code = getattr(function, '__code__', None)
        if function is found or code is None or not kept.keys() & set(code.co_names):
            by = type(found).__qualname__ if code is None else f'{code.co_name} of {code.co_filename}'
            return (
                f'its method {name} was replaced on this very module, by {by}, which would not call the gate; gate the '
                f'model before that is applied, or undo it first (del module.{name})'
            )
    return None


def _methods(adapter: type[GatedModule]) -> set[str]:
    """Return the names of the methods that gated modules have from their adapter."""
    bases = adapter.__mro__[: adapter.__mro__.index(nn.Module)]
    return {name for base in bases for name, value in vars(base).items() if isinstance(value, FunctionType)}


def _kept_methods(module: nn.Module, adapter: type[GatedModule]) -> dict[str, str]:
    """Return the attributes in which a module keeps methods of its class that an adapter changes, with their names."""
    own = {k: v.__func__ for k, v in vars(module).items() if isinstance(v, MethodType) and v.__self__ is module}
    names = _methods(adapter)
    return {k: name for k, v in own.items() for name in names if v is getattr(type(module), name, None)}


def _set_class(module: Any, old: type[Any], new: type[Any]) -> None:
    """Replace the class ``old`` of a module, or of which its class is derived, by ``new``; kept methods follow."""
    kept = _kept_methods(module, module.gating.adapter)
    module.__class__ = _rebased(type(module), old, new)
    for attribute, name in kept.items():
        if hasattr(type(module), name):
            vars(module)[attribute] = MethodType(getattr(type(module), name), module)


def _rebased(kind: type[Any], old: type[Any], new: type[Any]) -> type[Any]:
    """Return a copy of the class ``kind`` in which the base class ``old`` is replaced by ``new``.

    Parametrizations, FSDP and profilers derive a class from a module's, so that the base may lie deeper.
    """
    if kind is old:
        return new
    bases = tuple(_rebased(base, old, new) if issubclass(base, old) else base for base in kind.__bases__)
    members = {name: value for name, value in vars(kind).items() if name not in ('__dict__', '__weakref__')}
    made = type(kind.__name__, bases, members)
    for name, value in members.items():
        if isinstance(value, FunctionType) and '__class__' in value.__code__.co_freevars:
            setattr(made, name, _method_of(made, value))
    return made


def _method_of(kind: type[Any], function: FunctionType) -> FunctionType:
    """Return a copy of a method for a copy of its class, in which ``super()`` finds that class."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    closure = tuple(CellType(kind) if name == '__class__' else cell for name, cell in cells)
    made = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, closure)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _take_out(host: nn.Module, name: str) -> list[Part]:
    """Take a parameter, buffer or child out of a module; return it in a list, empty if there is none so named."""
    path, _, leaf = name.rpartition('.')
    holder = host.get_submodule(path)
    for kind in TENSORS_AND_CHILDREN:
        parts = getattr(holder, kind)
        if leaf in parts:
            return [Part(path, kind, leaf, order=tuple(parts), value=parts.pop(leaf))]
    return []


def _put_back(host: nn.Module, part: Part) -> None:
    """Put a part back into its module, at its old place in the order, on the module's present device and dtype."""
    parts = getattr(host.get_submodule(part.path), part.kind)
    parts[part.name] = _moved(part, device_of(host), computed_dtype(host))
    for name in part.order:
        if name in parts:
            parts[name] = parts.pop(name)


def _moved(part: Part, device: torch.device | None, dtype: torch.dtype | None) -> Tensor | nn.Module | None:
    """Return the tensor or module of a part, moved to a device and a dtype.

    It stays the same object unless one of the two is on ``meta``.
    """
    if device is None:
        return part.value
    holder = nn.Module()
    held = getattr(holder, part.kind)
    held[part.name] = part.value
    if any(tensor.is_meta for tensor in (*holder.parameters(), *holder.buffers())) and device.type != 'meta':
        holder.to_empty(device=device)
    holder.to(device=device, dtype=dtype)
    return held[part.name]
