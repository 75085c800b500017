"""Backbones with Agent, SAGA and other attention; most are mmdet's or mmpretrain's with their attention gated."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import NoReturn

from mmgate._environment import available
from mmgate.registry import MODELS

# By file, the package that it is built on, and its backbones.
FILES = {
    'cswin': ('mmengine', ['AgentCSwin']),
    'dgvit': ('mmpretrain', ['DGViT']),
    'pvt': ('mmdet', ['AgentPVT', 'PVT', 'PVTv2', 'SAGAPVT', 'SAGAPVTv2']),
    'swin': ('mmdet', ['AgentSwin', 'SAGASwin', 'Swin']),
}
__all__: list[str] = []


def _absent(name: str, package: str, **_: object) -> NoReturn:
    raise ImportError(f"{name} is built on a class of {package}'s, which cannot be imported here; install it.")


for _file, (_package, _names) in FILES.items():
    if available(_package):
        _module = import_module(f'{__name__}.{_file}')
        globals().update({_name: getattr(_module, _name) for _name in _names})
        __all__ += _names
    else:
        # A config that names one gets an error with the missing package.
        for _name in _names:
            MODELS.register_module(name=_name, module=partial(_absent, _name, _package))
