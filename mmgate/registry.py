"""Registries of scope ``mmgate``, children of mmengine's roots, so that ``type='mmgate.X'`` works in any config.

Where there is no mmengine, :data:`MODELS` knows mmgate's own layers by name and there are no others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from mmgate._environment import torch_alone

Registered = TypeVar('Registered', bound=Callable[..., Any])


class Names:
    """Classes and functions by their names, for rules that name a gate."""

    def __init__(self) -> None:
        self.module_dict: dict[str, Any] = {}

    def register_module(self) -> Callable[[Registered], Registered]:
        """Return a decorator that enters what it decorates."""

        def enter(registered: Registered) -> Registered:
            self.module_dict[registered.__name__] = registered
            return registered

        return enter

    def get(self, name: str) -> Any:
        """Return what is called ``name``, with the scope or without, or None."""
        return self.module_dict.get(name.removeprefix('mmgate.'))

    @property
    def root(self) -> Names:
        """The registry above: there is none."""
        return self


MODELS: Any
if torch_alone():
    MODELS = Names()
else:
    from mmengine.registry import DATASETS as MMENGINE_DATASETS
    from mmengine.registry import HOOKS as MMENGINE_HOOKS
    from mmengine.registry import MODELS as MMENGINE_MODELS
    from mmengine.registry import OPTIM_WRAPPER_CONSTRUCTORS as MMENGINE_OPTIM_WRAPPER_CONSTRUCTORS
    from mmengine.registry import TASK_UTILS as MMENGINE_TASK_UTILS
    from mmengine.registry import TRANSFORMS as MMENGINE_TRANSFORMS
    from mmengine.registry import Registry

    MODELS = Registry(
        'model',
        parent=MMENGINE_MODELS,
        scope='mmgate',
        locations=['mmgate.gates', 'mmgate.layers', 'mmgate.backbones', 'mmgate.speed.matching'],
    )
    DATASETS = Registry('dataset', parent=MMENGINE_DATASETS, scope='mmgate', locations=['mmgate.datasets.svhn'])
    TRANSFORMS = Registry('transform', parent=MMENGINE_TRANSFORMS, scope='mmgate', locations=['mmgate.datasets.noise'])
    TASK_UTILS = Registry(
        'task util', parent=MMENGINE_TASK_UTILS, scope='mmgate', locations=['mmgate.speed.matching.assigner']
    )
    HOOKS = Registry(
        'hook',
        parent=MMENGINE_HOOKS,
        scope='mmgate',
        locations=[
            'mmgate.analysis.hooks',
            'mmgate.speed.hooks',
            'mmgate.train.data_check_hook',
            'mmgate.train.gates_hook',
            'mmgate.train.interrupt_hook',
            'mmgate.train.reproducible',
        ],
    )
    OPTIM_WRAPPER_CONSTRUCTORS = Registry(
        'optimizer wrapper constructor',
        parent=MMENGINE_OPTIM_WRAPPER_CONSTRUCTORS,
        scope='mmgate',
        locations=['mmgate.speed.parameter_groups', 'mmgate.train.decay'],
    )
