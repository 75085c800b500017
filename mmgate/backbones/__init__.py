"""Backbones with agent, SAGA and other attention: those of mmdet and mmpretrain swapped, where the packages are."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any, NoReturn

from mmgate._environment import available
from mmgate.registry import MODELS

# name: the package and the class that it is built on, and our file
HOSTS = {
    'AgentCSwin': ('mmengine', 'BaseModule', 'cswin'),
    'AgentPVT': ('mmdet', 'PyramidVisionTransformer', 'pvt'),
    'AgentSwin': ('mmdet', 'SwinTransformer', 'swin'),
    'DGViT': ('mmpretrain', 'VisionTransformer', 'dgvit'),
    'LinearPVT': ('mmdet', 'PyramidVisionTransformer', 'pvt'),
    'LinearPVTv2': ('mmdet', 'PyramidVisionTransformerV2', 'pvt'),
    'LinearSwin': ('mmdet', 'SwinTransformer', 'swin'),
    'SAGAPVT': ('mmdet', 'PyramidVisionTransformer', 'pvt'),
    'SAGAPVTv2': ('mmdet', 'PyramidVisionTransformerV2', 'pvt'),
    'SAGASwin': ('mmdet', 'SwinTransformer', 'swin'),
}


def _absent(name: str, **_: object) -> NoReturn:
    package, host, _file = HOSTS[name]
    raise ImportError(f"{name} is built on {package}'s {host}, and {package} cannot be imported here; install it.")


__all__: list[str] = []
for _name, (_package, _, _file) in HOSTS.items():
    if available(_package):
        globals()[_name] = getattr(import_module(f'{__name__}.{_file}'), _name)
        __all__.append(_name)
    else:  # a config that names one is told what is missing
        MODELS.register_module(name=_name, module=partial(_absent, _name))


def __getattr__(name: str) -> Any:
    if name in HOSTS:
        _absent(name)
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
