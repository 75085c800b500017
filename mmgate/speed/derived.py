"""Classes derived from a mixin and a module's class, for modules that change their class in place."""

from __future__ import annotations

import functools
from typing import Any, SupportsIndex

from torch import nn

from mmgate.gating import gated_class


@functools.cache
def derived_class(mixin: Any, base: Any, prefix: str, /) -> type[Any]:
    """Return the subclass of a mixin and, after it, of a module's class, named by a prefix and the latter's name.

    It is made once. Its instances are pickled by the two classes, because no module has a name for it.
    """
    members = dict(__module__=__name__, __reduce_ex__=_reduce, derived_by=(mixin, prefix))
    return type(f'{prefix}{base.__name__}', (mixin, base), members)


def host_method(mixin: Any, module: Any, name: str) -> Any:
    """Return the function that a module, of a derived class, its subclass or neither, has as a method without a mixin.

    None if there is no such method.
    """
    # An override above the mixin calls it; one that the mixin does not have counts wherever it is.
    owner = super(mixin, module) if isinstance(module, mixin) and name in vars(mixin) else module
    return getattr(getattr(owner, name, None), '__func__', None)


def _reduce(module: Any, protocol: SupportsIndex) -> tuple[Any, ...]:
    """Return what pickles name instead of a derived class: the base's class and all mixins, the outermost last."""
    cls = type(module)
    mixins: list[tuple[Any, str]] = []
    while 'derived_by' in vars(cls):
        mixins.insert(0, vars(cls)['derived_by'])
        cls = cls.__bases__[1]
    # The base's class, or the pair of which the class of a gated module is made.
    adapter_and_host = vars(cls).get('adapter_and_host', (cls,))
    state: Any = module.__getstate__()
    return _new_instance, (adapter_and_host, mixins), state


def _new_instance(adapter_and_host: tuple[Any, ...], mixins: list[tuple[Any, str]]) -> nn.Module:
    """Return an instance of a derived class without its state, which pickle sets; pickles name this function."""
    cls: Any = adapter_and_host[0] if len(adapter_and_host) == 1 else gated_class(*adapter_and_host)
    for mixin, prefix in mixins:
        cls = derived_class(mixin, cls, prefix)
    return cls.__new__(cls)
