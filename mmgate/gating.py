"""Gate a module in place: its class becomes a subclass of its former class, and it receives a child ``gate``.

Nothing of the host is copied, renamed or taken out, so that hooks, shards, parametrizations and ties stay as they were.
The class changes when the gate is put in and when it is removed. A gate is off by a flag of the thread.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from itertools import chain
from traceback import walk_stack
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, SupportsIndex

import torch
from torch import nn
from torch.fx import Proxy
from torch.utils import checkpoint

from mmgate.errors import ConfigError
from mmgate.former import OF_ADAPTERS, refuse_former
from mmgate.gate import CHILD, Gate, Sizes, StateDict, are_hidden, gates_hidden
from mmgate.ops.tracing import is_compiling

# The dtypes in which layers compute; quantised weights are stored in others.
COMPUTED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# The attribute of a gated module that holds its record.
RECORD = 'gating'
# The attribute in which mmengine keeps, while it initialises a model, the text that it logs of it, by parameter.
REPORT = '_params_init_info'


class Adapter(nn.Module):
    """Base class of adapters; an adapter lets gates into one family of attention modules (hosts).

    An adapter overrides ``forward`` with the host's signature and calls its gate there. The class of a gated module
    derives from the adapter and, after it, from the host's class, so that ``self`` has all attributes of the host.

    Attributes:
        gate: Child that computes the gate.
        gating: The record of a module that a rule has gated; else None.
        unused: Dotted names of the host's parameters, buffers and children that a gated forward does not use. They stay
            in the module and its state dict, frozen: the optimizer and DDP pass over them, the host's forward has them
            while the gate is off, and a checkpoint may lack them.
    """

    gate: Any
    unused: ClassVar[tuple[str, ...]] = ()
    gating: Any = None
    switch: Switch | None = None

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
    def around(cls, model: nn.Module, path: str) -> dict[str, Any]:
        """Return sizes that the model around a host tells, by their names in :class:`Sizes`.

        Args:
            model: The model.
            path: Name of the host in it.
        """
        return {}

    def gates(self) -> list[Gate]:
        """Return the module's gates: its child ``gate``, or each of those in it, by name, of attention with several."""
        # Not by self.gate, which timm's adapters have as None while it is off.
        child: Any = self._modules[CHILD]
        return [module for module in child.modules() if isinstance(module, Gate)]

    def _load_from_state_dict(self, state_dict: StateDict, prefix: str, *args: object, **kwargs: object) -> None:
        lacking = {name: t.detach() for name, t in unused_tensors(self).items() if f'{prefix}{name}' not in state_dict}
        record = record_of(self)
        # A file of gates alone says nothing of the host.
        of_host = (key for key in state_dict if key.startswith(prefix) and not key.startswith(f'{prefix}{CHILD}.'))
        if record is not None and any(True for _ in of_host):
            record.lacks = list(lacking)
        state_dict.update({f'{prefix}{name}': tensor for name, tensor in lacking.items()})
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the module's children as ``Module.named_children`` does; while gates are hidden, not the gate."""
        for name, child in super().named_children():
            if name != CHILD or not are_hidden():
                yield name, child

    def apply(self, fn: Callable[[nn.Module], None]) -> Any:
        """Apply a function as ``Module.apply`` does; while mmengine initialises a model around, not to the gate."""
        with gates_hidden(are_hidden() or REPORT in vars(self)):
            return super().apply(fn)

    def _replicate_for_data_parallel(self) -> Any:
        replica: Any = super()._replicate_for_data_parallel()
        # It runs in another thread, which does not have this one's flag.
        replica.switch = Switch(SimpleNamespace(off=is_off(self)))
        return replica

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        made_of = vars(type(self)).get('made_of')
        # A class that a file defines is found by its name.
        if made_of is None:
            return super().__reduce_ex__(protocol)
        # Every object has __getstate__ from Python 3.11 on.
        state = self.__getstate__() if hasattr(self, '__getstate__') else vars(self)
        return _new_instance, made_of, state


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
        adapter: Adapter of the host's family.
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
    methods = _methods_of(adapter)
    if 'forward' not in methods and not methods & _names_of(type(host)):
        raise TypeError(f'{adapter.__qualname__} has no forward, which calls the gate; write it.')
    if getattr(host, CHILD, None) is not None:
        cls = type(host)
        raise ConfigError(f"this {cls.__module__}.{cls.__qualname__} has an attribute 'gate' already.")
    sizes = adapter.sizes(host)
    told = {} if model is None else adapter.around(model, path)
    if isinstance(sizes, Sizes):
        return gate_type(replace(sizes, **told), **options)
    return nn.ModuleDict({name: gate_type(replace(one, **told), **options) for name, one in sizes.items()})


class Switch:
    """Switch of a gated module's gate, one in each thread; a copy or a pickle of it is on.

    Args:
        here: Namespace whose attribute ``off`` is True while the gate is off, else False or absent.
    """

    def __init__(self, here: Any = None) -> None:
        # One for each module: in a common set torch.compile would guard every module's id, and compile each layer anew.
        if here is None:
            here = threading.local()
            here.off = False  # found faster than an attribute that is absent
        self.here = here

    def __reduce__(self) -> tuple[Any, ...]:
        return Switch, ()


@dataclass
class Record:
    """Record that a gated module keeps of its gating.

    Attributes:
        adapter: Adapter of the host's family.
        name: Name of the module in the model that was swapped.
        rule: Rule that gated it.
        child: Path to the module from the one that the rule chose; empty if the rule chose the module itself.
        hidden: The host's plain attribute of the child's name, while the gate is in the module. timm's is None.
        froze: The unused parameters that gating has frozen.
        lacks: The unused tensors that the last checkpoint of the host did not have.
    """

    adapter: type[Adapter]
    name: str
    rule: Mapping[str, Any]
    child: str = ''
    hidden: dict[str, Any] = field(default_factory=dict)
    froze: list[str] = field(default_factory=list)
    lacks: list[str] = field(default_factory=list)

    def chosen_name(self, name: str) -> str:
        """Return the name of the module that the rule named, which may be a wrapper around the gated one.

        Args:
            name: The gated module's name in the same model.
        """
        return f'.{name}'.removesuffix(f'.{self.child}')[1:] if self.child else name


_CLASSES: dict[tuple[type[Adapter], type[nn.Module]], type[Any]] = {}


def gated_class(adapter: type[Adapter], host: type[nn.Module]) -> type[Any]:
    """Return the class of gated modules: a subclass of adapter and host, with the host's methods while a gate is off.

    It is made once for each pair. Its instances are pickled by the pair, because no module has a name for it.
    """
    if (adapter, host) in _CLASSES:
        return _CLASSES[adapter, host]
    adapter_methods = _methods_of(adapter)
    host_names = _names_of(host)
    members: dict[str, Any] = {
        name: _either(adapter, host, name) for name in sorted(adapter_methods & host_names - {'forward'})
    }
    # An adapter may override another method than the host's forward, as timm's Swin block has one for its attention.
    called: Any = adapter if 'forward' in adapter_methods else host
    # The replacement of mmcv's deformable attention, for use without mmcv, has no forward.
    shown = adapter.forward if host.forward is nn.Module.forward else host.forward

    @wraps(shown, assigned=('__name__', '__qualname__', '__doc__'))
    def gated_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        # torch.fx cannot look into a gate, whose code depends on sizes. As torch's attention, it is one node.
        for given in (*args, *kwargs.values()):
            if isinstance(given, Proxy):
                tracer: Any = given.tracer
                return tracer.create_proxy('call_module', tracer.path_of_module(self), args, kwargs)
        if not is_off(self):
            return called.forward(self, *args, **kwargs)
        refuse_recomputation()
        return host.forward(self, *args, **kwargs)

    members.update(__module__=__name__, made_of=(adapter, host), forward=gated_forward)
    members['__doc__'] = f'{host.__module__}.{host.__qualname__} with a gate, called by {adapter.__qualname__}.forward.'
    made = type(f'Gated{host.__name__}', (adapter, host), members)
    return _CLASSES.setdefault((adapter, host), made)


def _bases(cls: type, below: type) -> tuple[type, ...]:
    """Return a class and those of its bases that come before ``below``."""
    return cls.__mro__[: cls.__mro__.index(below)]


def _methods_of(adapter: type[Adapter]) -> set[str]:
    """Return the names of an adapter's methods, without those of every adapter."""
    return {name for base in _bases(adapter, Adapter) for name, value in vars(base).items() if _is_method(value)}


def _names_of(host: type[nn.Module]) -> set[str]:
    """Return the names that a host's class has beyond those of every module."""
    return {name for base in _bases(host, nn.Module) for name in vars(base)}


def _is_method(value: object) -> bool:
    return inspect.isfunction(value) and not value.__name__.startswith('__')


def _either(adapter: Any, host: Any, name: str) -> Callable[..., Any]:
    """Return a method that is the adapter's while the gate is on, and the host's while it is off."""

    # Not with the module's name: Dynamo of torch 2.1 does not look into functions of torch.nn.
    @wraps(getattr(host, name), assigned=('__name__', '__qualname__', '__doc__'))
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_off(self):
            return getattr(adapter, name)(self, *args, **kwargs)
        refuse_recomputation()
        return getattr(host, name)(self, *args, **kwargs)

    return method


def _new_instance(adapter: type[Adapter], host: type[nn.Module]) -> Adapter:
    """Return an instance of a gated class without its state, which pickle sets; pickles name this function."""
    cls: Any = gated_class(adapter, host)
    return cls.__new__(cls)


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


def gate_module(host: Any, adapter: type[Adapter], gate: nn.Module, record: Record) -> None:
    """Gate a module in place: give it a gate as a child, and a class whose ``forward`` calls the gate.

    Args:
        host: Module to be gated.
        adapter: Adapter of its family.
        gate: Child that it receives, on the host's device; it gets the host's mode.
        record: Record that the module keeps.
    """
    gate.train(host.training)
    if CHILD in vars(host):
        record.hidden[CHILD] = vars(host).pop(CHILD)
    host.__class__ = gated_class(adapter, type(host))
    host._modules[CHILD] = gate
    vars(host).update({RECORD: record, 'switch': Switch()})
    freeze_unused(host)


def freeze_unused(gated: Any) -> None:
    """Freeze the parameters of a gated module's host that a gated forward does not use."""
    for name, tensor in unused_tensors(gated).items():
        if tensor.requires_grad:
            tensor.requires_grad_(False)
            gated.gating.froze.append(name)


def refuse_removal(name: str, module: Any) -> None:
    """Raise ConfigError if the class of a gated module was changed, or a method replaced, after its gating."""
    cls: Any = type(module)
    if 'made_of' not in vars(cls):
        raise ConfigError(
            f'{name}: the class {cls.__name__} was derived from the gated one after gating, as parametrizations and '
            'FSDP do; undo that first, then remove the gate.'
        )
    replaced = bypass_of(module, cls.made_of[0])
    if replaced is not None:
        raise ConfigError(f'{name}: its gate cannot be removed: {replaced}.')


def remove_gate(module: Any) -> None:
    """Remove the gate of a module, with its record and hooks, so that the module is vanilla again.

    :func:`refuse_removal` says if that is possible.
    """
    record = vars(module).pop(RECORD)
    del module.switch
    del module._modules[CHILD]
    unused = unused_tensors(module)
    # Not where others have frozen the host since, as PEFT does, and detectors their teacher.
    if all(tensor.requires_grad for name, tensor in module.named_parameters() if name not in unused):
        for name in unused.keys() & record.froze:
            unused[name].requires_grad_(True)
    module.__class__ = type(module).made_of[1]
    vars(module).update(record.hidden)


def is_off(module: Adapter) -> bool:
    """Return True if the gate of a gated module is off in this thread."""
    return module.switch is not None and getattr(module.switch.here, 'off', False)


@contextmanager
def gates_off(model: nn.Module) -> Iterator[None]:
    """Switch the gates of a model off in this thread inside a ``with`` block: the host's own forward runs."""
    # A shallow copy shares the switch of its original.
    switches = [*{id(one): one.here for one in _switches(model)}.values()]
    before = [vars(switch).get('off') for switch in switches]
    for switch in switches:
        switch.off = True
    try:
        yield
    finally:
        # torch.compile would tell False from an attribute that is absent.
        for switch, was in zip(switches, before, strict=True):
            if was is None:
                del switch.off
            else:
                switch.off = was


def _switches(model: nn.Module) -> Iterator[Switch]:
    """Yield the switches of a model's gated modules, without the names of all modules, which would take longer."""
    left = [model]
    while left:
        module: Any = left.pop()
        if isinstance(module, Adapter) and module.switch is not None:
            yield module.switch
        else:
            left += [child for child in module._modules.values() if child is not None]


def refuse_recomputation() -> None:
    """Raise RuntimeError if activation checkpointing may compute what is running again, without this thread's flag."""
    if is_compiling():
        return
    reentrant = checkpoint.CheckpointFunction.forward.__code__
    for frame, _ in walk_stack(None):
        again = frame.f_globals is vars(checkpoint) and torch.is_grad_enabled()
        if frame.f_code is reentrant:
            # It runs without gradients, and comes again if an input of it has one.
            again = any(frame.f_locals['ctx'].needs_input_grad)
        if again:
            raise RuntimeError(
                'gates_disabled does not reach activation checkpointing, which computes a part of the model again in '
                'the backward pass, where the gates are on. Switch checkpointing off (with_cp=False), or run the '
                'model inside torch.no_grad(); call backward() outside of gates_disabled.'
            )


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
    made_of = getattr(type(module), 'made_of', None)
    return type(module) if made_of is None else made_of[1]


def bypass_of(module: nn.Module, adapter: type[Adapter]) -> str | None:
    """Return the reason why a gate would not be called in a module, such as a method that was set on it; else None.

    Args:
        module: Module to be gated.
        adapter: Adapter of its family.
    """
    hooked = any('_hf_hook' in vars(part) for part in module.modules())
    if hooked and any(parameter.is_meta for parameter in module.parameters()):
        return (
            "accelerate has offloaded its weights, and would not fetch the gate's; gate the model before that, and "
            f"name the gated class in accelerate's preload_module_classes=['Gated{type(module).__name__}']"
        )
    names = {name for base in _bases(adapter, nn.Module) for name, value in vars(base).items() if _is_method(value)}
    for name in sorted(names & vars(module).keys()):
        found = vars(module)[name]
        code = getattr(found, '__code__', None)
        by = type(found).__qualname__ if code is None else f'{code.co_name} of {code.co_filename}'
        return (
            f'its method {name} was replaced on this very module, by {by}; gate the model before that is applied, and '
            f'remove gates after it is undone (del module.{name})'
        )
    return None
