"""mmgate's registries below mmengine's, so that ``type='mmgate.X'`` works in any config.

The modules of components are imported at the first look into a registry. Without mmengine, :data:`MODELS` holds
mmgate's layers by name, and there are no other registries.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar

from mmgate._environment import without_mmengine

Registered = TypeVar('Registered', bound=Callable[..., Any])


class Names:
    """Small registry of classes by name, which replaces mmengine's where mmengine is missing."""

    def __init__(self) -> None:
        self.module_dict: dict[str, Callable[..., Any]] = {}

    def register_module(self, *, force: bool = False) -> Callable[[Registered], Registered]:
        """Return a decorator that registers a class or function under its name, and replaces what is there."""

        def enter(registered: Registered) -> Registered:
            self.module_dict[registered.__name__] = registered
            return registered

        return enter

    def get(self, name: str) -> Callable[..., Any] | None:
        """Return the class or function registered under a name, with or without the scope ``mmgate.``, or None."""
        self.import_from_location()
        return self.module_dict.get(name.removeprefix('mmgate.'))

    def import_from_location(self) -> None:
        """Import the modules that register what mmgate has; mmengine's registries have this method, too."""
        import_module('mmgate.gates')


MODELS: Any
if without_mmengine():
    MODELS = Names()
else:
    from mmengine import registry as root
    from mmengine.registry import Registry

    class Ours(Registry):
        """Registry in which a name stays theirs who register it before mmgate's modules are imported."""

        def _register_module(self, module: Any, module_name: Any = None, force: bool = False) -> None:
            taken = self.module_dict.get(module_name or module.__name__) if _of_mmgate(module) else None
            if taken is None or _of_mmgate(taken):
                super()._register_module(module, module_name, force)

    def _of_mmgate(registered: Any) -> bool:
        return getattr(registered, '__module__', '').startswith('mmgate.')

    def _child(parent: Registry, *modules: str, kind: type[Registry] = Ours) -> Registry:
        """Make mmgate's registry below one of mmengine's; ``locations`` are the modules with its entries."""
        locations = [f'mmgate.{module}' for module in modules]
        return kind(parent.name, parent=parent, scope='mmgate', locations=locations)

    class Models(Ours):
        """Registry of models, some of which are imported when they are looked up: entries with ``found_at``."""

        def get(self, key: str) -> Any:
            """Return what is registered by a name, with or without a scope; None if there is nothing."""
            entry = super().get(key)
            module = getattr(entry, 'found_at', None)
            return entry if module is None else getattr(import_module(module), entry.__name__)

    MODELS = _child(root.MODELS, 'gated', 'gates', 'backbones', 'speed.matching', kind=Models)
    # Those of projects.
    DATASETS = _child(root.DATASETS, 'moved')
    TRANSFORMS = _child(root.TRANSFORMS, 'moved')
    HOOKS = _child(root.HOOKS, 'analysis.hooks', 'speed.hooks', 'mm.gates_hook')
    OPTIM_WRAPPER_CONSTRUCTORS = _child(root.OPTIM_WRAPPER_CONSTRUCTORS, 'mm.parameter_groups')
    PARAM_SCHEDULERS = _child(root.PARAM_SCHEDULERS, 'mm.schedule')
