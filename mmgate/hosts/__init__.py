"""Adapters: the classes that let gates into the attention modules of other packages, one file for each package.

A file that is called like a package has the adapters for it. It is imported when a model holds a module of the package.
"""

from mmgate.hosts import mmcv, projects, torch  # noqa: F401  which need no further package
from mmgate.hosts.table import adapter_for, adapts, gates_for

__all__ = ['adapter_for', 'adapts', 'gates_for']
