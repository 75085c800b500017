"""mmcv's compiled operators in torch, for an mmcv that was installed without them.

A plain ``pip install`` of mmcv brings its Python files and no compiled module ``mmcv._ext``, and ``import mmcv.ops``
fails. :func:`provide` lets that import find :mod:`.extension` instead. A compiled module comes first wherever there is
one, whether it loads or not.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import logging
import sys
from collections.abc import Sequence
from types import ModuleType

from mmgate._environment import log

NAME = 'mmcv._ext'
IN_TORCH = (
    'NMS and soft NMS, RoIAlign, the focal losses, deformable convolution and deformable attention, computed in torch '
    '(on GPUs by torchvision, where it is installed)'
)

TAKE_OPERATORS = ('mmdet.models', 'mmdet.structures', 'mmseg.models')  # import them from mmcv.ops by name


def provide() -> None:
    """Let ``import mmcv._ext`` find our operators where it would find nothing. Nothing is imported before that."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())  # the last one, which is asked if no other finds the module


def provided() -> bool:
    """Return True if mmcv's operators are ours in this process."""
    spec = getattr(sys.modules.get(NAME), '__spec__', None)
    return isinstance(getattr(spec, 'loader', None), _Finder)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self, origin='mmgate.mmcv_ext') if name == NAME else None

    def exec_module(self, module: ModuleType) -> None:
        from . import extension

        vars(module).update({name: getattr(extension, name) for name in extension.__all__})
        module.__getattr__ = extension.not_compiled  # type: ignore[method-assign]
        log(f'mmcv has no compiled operators. It goes on with {IN_TORCH}; its other operators raise an error.')
        # The forks catch the failed import and replace mmcv's functions by some that raise.
        early = sorted({name.partition('.')[0] for name in sys.modules if name.startswith(TAKE_OPERATORS)})
        if early:
            log(
                f'{" and ".join(early)} was imported before mmgate, without mmcv.ops: what needs it there fails. '
                "Import mmgate first; mmdet's and mmseg's tools do by tools/mm.py.",
                logging.WARNING,
            )
