"""Which gate replaces which host class: one file a package, imported only where the package is.

Those of timm and transformers, whose import takes seconds, are imported once a model of theirs is met.
"""

from importlib import import_module

from mmgate._environment import available
from mmgate.hosts.table import adapter_for, adapts, gates_for, hosts_of

for _package in ('torch', 'mmcv', 'mmdet', 'mmseg', 'mmpretrain'):
    if _package in ('torch', 'mmcv') or available(_package):
        import_module(f'{__name__}.{_package}')
import_module(f'{__name__}.projects')

__all__ = ['adapter_for', 'adapts', 'gates_for', 'hosts_of']
