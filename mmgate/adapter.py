"""Base class of adapters, and what a gated module knows of its gate: a record of its gating, and a switch.

:mod:`.gating` puts gates in and takes them off.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from mmgate.errors import ConfigError, full_name
from mmgate.former import OF_ADAPTERS, refuse_former
from mmgate.gate import GATE_NAME, Gate, Sizes, StateDict, are_hidden, gates_hidden, initialise_gates, random_stream
from mmgate.wrappers import without_wrappers

# The dtypes in which layers compute; quantised weights are stored in others.
COMPUTED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# The attribute of a gated module that holds its record.
RECORD = 'gating'
# The attribute in which mmengine keeps, while it initialises a model, the text that it logs of it, by parameter.
REPORT = '_params_init_info'


class Adapter(nn.Module):
    """Base class of adapters; an adapter lets gates into attention modules of one class, or of several alike (hosts).

    An adapter overrides ``forward`` with the host's signature and calls its gate there. The class of a gated module
    derives from the adapter and, after it, from the host's class, so that ``self`` has all attributes of the host.

    Attributes:
        gate: Child that computes the gate.
        gating: The record of a gated module.
        unused: Dotted names of the host's parameters, buffers and children that a gated forward does not use. They stay
            in the module and its state dict, frozen: the optimizer and DDP pass over them, the host's forward has them
            while the gate is off, and a checkpoint may lack them.
    """

    gate: Any
    unused: ClassVar[tuple[str, ...]] = ()
    gating: Any = None

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Return an attribute of the host; for type checkers, since the host's class is a base as well."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        refuse_former(cls, OF_ADAPTERS)

    # An adapter gives its host the type that it reads, a class or a Protocol, and its gate the class of its kind.
    @classmethod
    def sizes(cls, host: Any) -> Sizes | dict[str, Sizes]:
        """Read channels, heads and other sizes off an attention module (the host), for its gate.

        An attention with several gates returns the sizes of each, by name; ``self.gate`` is then a ``ModuleDict``.
        """
        raise TypeError(f'{cls.__name__} does not say which sizes its hosts have.')

    @classmethod
    def check(cls, host: Any) -> None:
        """Raise ConfigError if an attention module computes something that this adapter's ``forward`` does not."""

    @classmethod
    def sizes_from_model(cls, model: nn.Module, path: str) -> dict[str, Any]:
        """Return sizes that the model around a host tells, by their names in :class:`Sizes`.

        Args:
            model: The model.
            path: Name of the host in it.
        """
        return {}

    def gates(self) -> list[Gate]:
        """Return the module's gates: its child ``gate``, or each of those in it, by name, of attention with several."""
        # Not by self.gate, which timm's adapters have as None while it is off.
        child: Any = self._modules[GATE_NAME]
        return [module for module in child.modules() if isinstance(module, Gate)]

    def _load_from_state_dict(self, state_dict: StateDict, prefix: str, *args: object, **kwargs: object) -> None:
        lacking = {name: t.detach() for name, t in unused_tensors(self).items() if f'{prefix}{name}' not in state_dict}
        record = record_of(self)
        # A file of gates alone says nothing of the host.
        of_host = (key for key in state_dict if key.startswith(prefix) and not key.startswith(f'{prefix}{GATE_NAME}.'))
        if record is not None and any(True for _ in of_host):
            record.lacks = list(lacking)
        state_dict.update({f'{prefix}{name}': tensor for name, tensor in lacking.items()})
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the module's children as ``Module.named_children`` does; while gates are hidden, not the gate."""
        for name, child in super().named_children():
            if name != GATE_NAME or not are_hidden():
                yield name, child

    def apply(self, fn: Callable[[nn.Module], None]) -> Any:
        """Apply a function as ``Module.apply`` does; while mmengine initialises a model around, not to the gate."""
        with gates_hidden(are_hidden() or REPORT in vars(self)):
            return super().apply(fn)

    def _replicate_for_data_parallel(self) -> Any:
        replica: Any = super()._replicate_for_data_parallel()
        # It runs in another thread, which does not have this one's flag.
        if self.gating is not None:
            replica.gating = replace(self.gating, switch=Switch(SimpleNamespace(off=is_off(self))))
        return replica


class Switch:
    """Switch of a gated module's gate, one in each thread; a copy or a pickle of it is on.

    Args:
        of_thread: Namespace whose attribute ``off`` is True while the gate is off, else False or absent.
    """

    def __init__(self, of_thread: Any = None) -> None:
        # One for each module: in a common set torch.compile would guard every module's id, and compile each layer anew.
        if of_thread is None:
            of_thread = threading.local()
            of_thread.off = False  # found faster than an attribute that is absent
        self.of_thread = of_thread

    def __reduce__(self) -> tuple[Any, ...]:
        return Switch, ()


@dataclass
class Record:
    """Record that a gated module keeps of its gating.

    Attributes:
        adapter: Adapter of the host's class.
        name: Name of the module in the model that was swapped.
        rule: Rule that gated it.
        inner: Path to the module from the one that the rule chose; empty if the rule chose the module itself.
        replaced: The host's plain attribute of the gate's name, while the gate is in the module. timm's is None.
        froze: The unused parameters that gating has frozen.
        lacks: The unused tensors that the last checkpoint of the host did not have.
        switch: The switch of the gate.
    """

    adapter: type[Adapter]
    name: str
    rule: Mapping[str, Any]
    inner: str = ''
    replaced: dict[str, Any] = field(default_factory=dict)
    froze: list[str] = field(default_factory=list)
    lacks: list[str] = field(default_factory=list)
    switch: Switch = field(default_factory=Switch)

    def chosen_name(self, name: str) -> str:
        """Return the name of the module that the rule chose, which may be a wrapper around the gated one.

        Args:
            name: The gated module's name in the same model.
        """
        # Wrappers may have come since.
        suffixes = [f'.{inner}' for inner in (self.inner, without_wrappers(self.inner)) if inner]
        return next((f'.{name}'.removesuffix(one)[1:] for one in suffixes if f'.{name}'.endswith(one)), name)


def make_gate(
    adapter: type[Adapter],
    host: Any,
    gate_type: type[Gate],
    model: nn.Module | None = None,
    path: str = '',
    /,
    **options: object,
) -> nn.Module:
    """Make a gate, or several in a ``ModuleDict``, for an attention module (the host), and return it.

    Args:
        adapter: Adapter of the host's class.
        host: Module to be gated.
        gate_type: Class of the gate.
        model: The model around the host, which may tell sizes; None if there is none.
        path: Name of the host in it.
        **options: Options of the gate.

    Raises:
        ConfigError: The adapter refuses the host, or the gate does not fit it; the message says why.
        TypeError: The adapter has no ``forward``, nor another method of the host's, that could call the gate.
        ValueError: The gate's constructor refuses an option.
    """
    adapter.check(host)
    methods = methods_of(adapter)
    if 'forward' not in methods and not methods & names_below(type(host), nn.Module):
        raise TypeError(f'{adapter.__qualname__} has no forward, which calls the gate; write it.')
    for name in (GATE_NAME, RECORD):
        if getattr(host, name, None) is not None:
            raise ConfigError(f'this {full_name(type(host))} has an attribute {name!r} already.')
    own = names_below(adapter, nn.Module) & (host._modules.keys() | host._parameters.keys() | host._buffers.keys())
    # A class's attribute comes before what a module registers, for the host's own methods, too.
    if own:
        raise ConfigError(f'{adapter.__qualname__} and the {full_name(type(host))} both have {sorted(own)[0]!r}.')
    sizes = adapter.sizes(host)
    from_model = {} if model is None else adapter.sizes_from_model(model, path)
    if isinstance(sizes, Sizes):
        return gate_type(replace(sizes, **from_model), **options)
    return nn.ModuleDict({name: gate_type(replace(one, **from_model), **options) for name, one in sizes.items()})


def initialised_gate(
    adapter: type[Adapter],
    host: Any,
    gate_type: type[Gate],
    name: str,
    model: nn.Module | None = None,
    /,
    **options: object,
) -> nn.Module:
    """Make a gate as :func:`make_gate` does, initialise it from the random stream of a name, and move it to its host.

    Args:
        adapter: Adapter of the host's class.
        host: Module to be gated.
        gate_type: Class of the gate.
        name: Name of the stream, and of the host in the model.
        model: The model around the host; None if there is none.
        **options: Options of the gate.
    """
    # Not on the device of a ``with torch.device`` around: its generator would be moved.
    with torch.device('cpu'), random_stream(name):
        gate = make_gate(adapter, host, gate_type, model, name, **options)
    around = [host] if model is None else [host, model]
    dtype = computed_dtype(*around)
    # Gates have the host's precision, but no random numbers of 16 bits.
    if dtype == torch.float64:
        gate.double()
    initialise_gates(name, gate)
    return gate.to(device=device_of(*around), dtype=dtype)


def why_not_called(module: nn.Module, adapter: type[Adapter]) -> str | None:
    """Return the reason why a gate would not be called in a module, such as a method that was set on it; else None.

    Args:
        module: Module to be gated.
        adapter: Adapter of its class.
    """
    hooked = any('_hf_hook' in vars(part) for part in module.modules())
    if hooked and any(parameter.is_meta for parameter in module.parameters()):
        return (
            "accelerate has offloaded its weights, and would not fetch the gate's; gate the model before that, and "
            f"name the gated class in accelerate's preload_module_classes=['Gated{type(module).__name__}']"
        )
    for name in sorted(methods_of(adapter) & vars(module).keys()):
        found = vars(module)[name]
        code = getattr(found, '__code__', None)
        by = type(found).__qualname__ if code is None else f'{code.co_name} of {code.co_filename}'
        return (
            f'its method {name} was replaced on this very module, by {by}; gate the model before that is applied, and '
            f'remove gates after it is undone (del module.{name})'
        )
    return None


def methods_of(adapter: type[Adapter]) -> set[str]:
    """Return the names of an adapter's methods, without those of every adapter."""
    return {name for base in _below(adapter, Adapter) for name, value in vars(base).items() if _is_method(value)}


def _below(cls: type, below: type) -> tuple[type, ...]:
    """Return a class and those of its bases that come before ``below``."""
    return cls.__mro__[: cls.__mro__.index(below)]


def names_below(cls: type, base: type) -> set[str]:
    """Return the names that a class has beyond those of one of its bases."""
    return {name for one in _below(cls, base) for name in vars(one)}


def _is_method(value: object) -> bool:
    return inspect.isfunction(value) and not value.__name__.startswith('__')


def is_off(module: Adapter) -> bool:
    """Return True if the gate of a gated module is off in this thread."""
    return module.gating is not None and getattr(module.gating.switch.of_thread, 'off', False)


def record_of(module: nn.Module) -> Record | None:
    """Return the record of a gated module; None for a module that no rule has gated."""
    return module.gating if isinstance(module, Adapter) else None


def gated_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield name and module for each module of a model that a rule has gated; a shared module comes once."""
    for name, module in model.named_modules():
        if record_of(module) is not None:
            yield name, module


def host_class(module: nn.Module) -> type[nn.Module]:
    """Return the class that a module has without its gate; for a module that is not gated, its own class."""
    adapter_and_host = getattr(type(module), 'adapter_and_host', None)
    return type(module) if adapter_and_host is None else adapter_and_host[1]


def unused_tensors(gated: Adapter) -> dict[str, Any]:
    """Return the parameters and buffers of the host that a gated forward does not use, by name in the module."""
    if not gated.unused:
        return {}
    named = gated.state_dict(keep_vars=True).items()
    return {k: t for k, t in named if any(k == part or k.startswith(f'{part}.') for part in gated.unused)}


def unused_names(model: nn.Module) -> list[str]:
    """Return the names of all tensors of a model that rest in it unused, because a gate replaces what used them."""
    return [
        f'{path}.{name}'.lstrip('.')
        for path, module in model.named_modules()
        if isinstance(module, Adapter)
        for name in unused_tensors(module)
    ]


def computed_dtype(*modules: nn.Module) -> torch.dtype | None:
    """Return the dtype in which modules compute, that of their first floating parameter, else buffer; or None.

    Quantised layers do not count: their weights are integers or have 8 bits, and their scales may have any dtype.
    """
    parts = [part for module in modules for part in module.modules() if not is_quantised(part)]
    parameters = (tensor for part in parts for tensor in part.parameters(recurse=False))
    buffers = (tensor for part in parts for tensor in part.buffers(recurse=False))
    return next((tensor.dtype for tensor in chain(parameters, buffers) if tensor.dtype in COMPUTED), None)


def is_quantised(part: nn.Module) -> bool:
    """Return True if a module, without its children, keeps numbers of 8 bits."""
    own = chain(part.parameters(recurse=False), part.buffers(recurse=False))
    return any(tensor.dtype.itemsize == 1 and tensor.dtype != torch.bool for tensor in own)


def device_of(*modules: nn.Module) -> torch.device | None:
    """Return the device of the first parameter or buffer of modules, or None."""
    tensors = (tensor for module in modules for tensor in (*module.parameters(), *module.buffers()))
    return next((tensor.device for tensor in tensors), None)
