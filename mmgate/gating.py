"""Gate a module in place: its class becomes a subclass of its former class, and it receives a child ``gate``.

Nothing of the host is copied, renamed or taken out, so that hooks, shards, parametrizations and ties stay as they were.
The class changes when the gate is put in and when it is removed. A gate is off by a flag of the thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from traceback import walk_stack
from typing import Any, SupportsIndex

import torch
from torch import nn
from torch.fx import Proxy
from torch.utils import checkpoint

from mmgate.adapter import (
    RECORD,
    Adapter,
    Record,
    Switch,
    is_off,
    methods_of,
    names_below,
    unused_tensors,
    why_not_called,
)
from mmgate.errors import ConfigError
from mmgate.gate import GATE_NAME
from mmgate.ops.tracing import is_compiling

_CLASSES: dict[tuple[type[Adapter], type[nn.Module]], type[Any]] = {}


def gate_module(host: Any, adapter: type[Adapter], gate: nn.Module, record: Record) -> None:
    """Gate a module in place: give it a gate as a child, and a class whose ``forward`` calls the gate.

    Args:
        host: Module to be gated.
        adapter: Adapter of its class.
        gate: Child that it receives, on the host's device; it gets the host's mode.
        record: Record that the module keeps.
    """
    gate.train(host.training)
    if GATE_NAME in vars(host):
        record.replaced[GATE_NAME] = vars(host).pop(GATE_NAME)
    host.__class__ = gated_class(adapter, type(host))
    host._modules[GATE_NAME] = gate
    vars(host)[RECORD] = record
    freeze_unused(host)


def gated_class(adapter: type[Adapter], host: type[nn.Module]) -> type[Any]:
    """Return the class of gated modules: a subclass of adapter and host, with the host's methods while a gate is off.

    It is made once for each pair. Its instances are pickled by the pair, because no module has a name for it.
    """
    if (adapter, host) in _CLASSES:
        return _CLASSES[adapter, host]
    adapter_methods = methods_of(adapter)
    host_names = names_below(host, nn.Module)
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

    members.update(__module__=__name__, adapter_and_host=(adapter, host), forward=gated_forward, __reduce_ex__=_reduce)
    members['__doc__'] = f'{host.__module__}.{host.__qualname__} with a gate, called by {adapter.__qualname__}.forward.'
    made = type(f'Gated{host.__name__}', (adapter, host), members)
    return _CLASSES.setdefault((adapter, host), made)


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


def _reduce(self: Any, protocol: SupportsIndex) -> str | tuple[Any, ...]:
    """Pickle a gated module by adapter and host; one of a class derived from the gated one, by that class."""
    adapter_and_host = vars(type(self)).get('adapter_and_host')
    if adapter_and_host is None:
        return nn.Module.__reduce_ex__(self, protocol)
    # Every object has __getstate__ from Python 3.11 on.
    state = self.__getstate__() if hasattr(self, '__getstate__') else vars(self)
    return _new_instance, adapter_and_host, state


def _new_instance(adapter: type[Adapter], host: type[nn.Module]) -> Adapter:
    """Return an instance of a gated class without its state, which pickle sets; pickles name this function."""
    cls: Any = gated_class(adapter, host)
    return cls.__new__(cls)


def freeze_unused(gated: Any) -> None:
    """Freeze the parameters of a gated module's host that a gated forward does not use."""
    for name, tensor in unused_tensors(gated).items():
        if tensor.requires_grad:
            tensor.requires_grad_(False)
            gated.gating.froze.append(name)


def refuse_removal(name: str, module: Any) -> None:
    """Raise ConfigError if the class of a gated module was changed, or a method replaced, after its gating."""
    cls: Any = type(module)
    if 'adapter_and_host' not in vars(cls):
        raise ConfigError(
            f'{name}: the class {cls.__name__} was derived from the gated one after gating, as parametrizations and '
            'FSDP do; undo that first, then remove the gate.'
        )
    replaced = why_not_called(module, cls.adapter_and_host[0])
    if replaced is not None:
        raise ConfigError(f'{name}: its gate cannot be removed: {replaced}.')


def remove_gate(module: Any) -> None:
    """Remove the gate of a module, with its record and hooks, so that the module is vanilla again.

    :func:`refuse_removal` says if that is possible.
    """
    record = vars(module).pop(RECORD)
    del module._modules[GATE_NAME]
    unused = unused_tensors(module)
    # Not where others have frozen the host since, as PEFT does, and detectors their teacher.
    if all(tensor.requires_grad for name, tensor in module.named_parameters() if name not in unused):
        for name in unused.keys() & record.froze:
            unused[name].requires_grad_(True)
    module.__class__ = type(module).adapter_and_host[1]
    vars(module).update(record.replaced)


@contextmanager
def gates_off(model: nn.Module) -> Iterator[None]:
    """Switch the gates of a model off in this thread inside a ``with`` block: the host's own forward runs."""
    # A shallow copy shares the switch of its original.
    switches = [*{id(one): one.of_thread for one in _switches(model)}.values()]
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
        if isinstance(module, Adapter) and module.gating is not None:
            yield module.gating.switch
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
