"""Backbones with Agent, SAGA and other attention; mmdet's PVT and Swin, and CSwin, with their attention gated.

A backbone's file, and the package that it is built on, are imported at its first use.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from mmgate._environment import why_not
from mmgate.moved import how_to_import
from mmgate.registry import MODELS

# By file, the package that it is built on, and its backbones.
FILES = {
    'cswin': ('mmengine', ['AgentCSwin']),
    'pvt': ('mmdet', ['AgentPVT', 'PVT', 'PVTv2', 'SAGAPVT', 'SAGAPVTv2']),
    'swin': ('mmdet', ['AgentSwin', 'SAGASwin', 'Swin']),
}
_FILE_OF = {name: file for file, (_, names) in FILES.items() for name in names}
__all__ = list(_FILE_OF)


def __getattr__(name: str) -> Any:
    if name not in _FILE_OF:
        moved = how_to_import(name)
        if moved is not None:
            raise ImportError(moved)
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    file = _FILE_OF[name]
    package = FILES[file][0]
    problem = why_not(package)
    if problem:
        raise ImportError(f"{name} is built on a class of {package}'s, which cannot be imported here; {problem}.")
    return getattr(import_module(f'{__name__}.{file}'), name)


def _builder(name: str) -> Callable[..., Any]:
    def build(**options: Any) -> Any:
        return __getattr__(name)(**options)

    build.__name__ = build.__qualname__ = name
    build.found_at = __name__  # type: ignore[attr-defined]
    return build


# MODELS.get finds the class.
for _name in __all__:
    MODELS.register_module(name=_name, module=_builder(_name))
