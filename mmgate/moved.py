"""Registered names that moved into projects: to build one without its project is an error that says what to import."""

from __future__ import annotations

from typing import Any, NoReturn

from mmgate import registry
from mmgate.errors import ConfigError

# By the module of a project and by registry, the names that it registers; it does so with ``force=True``.
MOVED: dict[str, dict[str, tuple[str, ...]]] = {
    'projects.dgsa': {'MODELS': ('DGViT',), 'DATASETS': ('SVHN',), 'TRANSFORMS': ('RandomNoise',)},
    'projects.linear_attention': {
        'MODELS': (
            'EfficientAttention',
            'EnhancedLinearAttention',
            'FocusedLinearAttention',
            'HydraAttention',
            'InLineAttention',
            'LinearAngularAttention',
            'LinearPVT',
            'LinearPVTv2',
            'LinearSwin',
            'MLLAAttention',
            'PolaFormerAttention',
            'RALAAttention',
        ),
    },
    'projects.plug_classifiers': {'MODELS': ('LVViT', 'TokenLabelHead', 'ViTAE')},
}


def how_to_import(name: str) -> str | None:
    """Return the message for a name that a project registers, or None for any other name."""
    plain = name.rpartition('.')[2]
    for project, registered in MOVED.items():
        if any(plain in names for names in registered.values()):
            return (
                f'{name} is registered by {project}, which is in the repository of mmgate, not in its wheels. Write '
                f"custom_imports = dict(imports=['mmgate', '{project}']) into the config, or import {project}, and "
                'start Python in the repository, or with it in PYTHONPATH.'
            )
    return None


def register_moved() -> None:
    """Register, under each name that has moved, a function that raises ConfigError with what to import."""
    for registered in MOVED.values():
        for attribute, names in registered.items():
            for name in names:
                getattr(registry, attribute).register_module(name=name, module=_refusing(name))


def _refusing(name: str) -> Any:
    def moved(*_: object, **__: object) -> NoReturn:
        raise ConfigError(how_to_import(name))

    moved.__name__ = moved.__qualname__ = name
    return moved
