"""Backbones with agent, SAGA and other linear attention: mmdet's PVT and Swin swapped, where mmdet is."""

from __future__ import annotations

from functools import partial
from typing import NoReturn

from mmgate._environment import available
from mmgate.registry import MODELS

HOSTS = {
    'AgentPVT': 'PyramidVisionTransformer',
    'AgentSwin': 'SwinTransformer',
    'LinearPVT': 'PyramidVisionTransformer',
    'LinearSwin': 'SwinTransformer',
    'SAGAPVT': 'PyramidVisionTransformer',
    'SAGAPVTv2': 'PyramidVisionTransformerV2',
    'SAGASwin': 'SwinTransformer',
}


def _absent(name: str, **_: object) -> NoReturn:
    raise ImportError(f"{name} is built on mmdet's {HOSTS[name]}, and mmdet cannot be imported here; install it.")


if available('mmdet'):
    from .linear import LinearPVT, LinearSwin
    from .pvt import SAGAPVT, AgentPVT, SAGAPVTv2
    from .swin import AgentSwin, SAGASwin

    __all__ = ['AgentPVT', 'AgentSwin', 'LinearPVT', 'LinearSwin', 'SAGAPVT', 'SAGAPVTv2', 'SAGASwin']
else:
    __all__ = []
    for _name in HOSTS:  # a config that names one is told what is missing
        MODELS.register_module(name=_name, module=partial(_absent, _name))


def __getattr__(name: str) -> NoReturn:
    if name in HOSTS:
        _absent(name)
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
