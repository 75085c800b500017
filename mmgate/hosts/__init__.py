"""Adapters: the classes that let gates into the attention modules of other packages, one file for each package.

A file is imported only where its package is installed. The files of timm and transformers, whose import takes seconds,
are imported when the first module of theirs is met.
"""

from importlib import import_module

from mmgate._environment import available
from mmgate.hosts.table import adapter_for, adapts, gates_for, hosts_of

for _package in ('torch', 'mmcv', 'mmdet', 'mmseg', 'mmpretrain'):
    if _package in ('torch', 'mmcv') or available(_package):
        import_module(f'{__name__}.{_package}')
import_module(f'{__name__}.projects')

__all__ = ['adapter_for', 'adapts', 'gates_for', 'hosts_of']
