"""Adapters: the classes that let gates into the attention modules of other packages, one file for each package.

A file that is called like a package has the adapters for it. It is imported when a model holds a module of the package.
The files of torch and of the mm packages are imported with mmgate.
"""

from importlib import import_module

from mmgate._environment import EITHER, EXTRAS, available
from mmgate.hosts.table import adapter_for, adapts, gates_for

# The adapters of torch, mmcv and cloned projects, which need no further package.
for _package in ('torch', 'mmcv', 'projects', *filter(available, (*EITHER, *EXTRAS))):
    import_module(f'{__name__}.{_package}')

__all__ = ['adapter_for', 'adapts', 'gates_for']
