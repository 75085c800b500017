"""Gated and linear attention for mmdetection and mmsegmentation.

``import mmgate`` registers every component under the scope ``mmgate`` and makes ``_base_ = 'mmgate::...'`` resolve.
Where mmengine is not installed there are no configs: operators, layers, :func:`swap_attention` and gates as adapters
work with torch alone.
"""

from typing import Any

from . import mmcv_ext
from ._environment import check_environment, torch_alone

if not torch_alone():
    mmcv_ext.provide()
    check_environment()

from . import gates  # noqa: F401
from .errors import ConfigError
from .files import load_gates, save_gates
from .gate import Gate, Sizes, refuse_to_split
from .gates.base.deformable import DeformableAdapter, DeformableGate
from .gates.base.dense import DenseAdapter, DenseGate
from .gates.base.linear import LinearGate
from .gates.base.map import MapAdapter, MapGate, map_attention
from .gating import Adapter
from .hosts import adapts
from .hosts.around import nearest_with
from .listing import list_attention
from .notes import note
from .recording import record
from .registry import MODELS
from .removal import gates_disabled, restore_attention
from .swap import swap_attention
from .training import gate_parameters, train_only_gates

__version__ = '0.2.0'
__all__ = [
    'MODELS',
    'ConfigError',
    'DeformableGate',
    'DeformableAdapter',
    'DenseGate',
    'DenseAdapter',
    'Gate',
    'Adapter',
    'LinearGate',
    'MapGate',
    'MapAdapter',
    'Sizes',
    '__version__',
    'adapts',
    'gate_parameters',
    'gates_disabled',
    'list_attention',
    'load_gates',
    'map_attention',
    'nearest_with',
    'note',
    'record',
    'refuse_to_split',
    'restore_attention',
    'save_gates',
    'swap_attention',
    'train_only_gates',
]

if torch_alone():

    def __getattr__(name: str) -> Any:
        if name == 'Gated':  # builds from configs
            check_environment()
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')

else:
    from importlib.metadata import PackageNotFoundError, distribution

    from mmengine.config.utils import MODULE2PACKAGE

    from . import backbones  # noqa: F401
    from .gated import Gated
    from .moved import register_moved

    __all__ += ['Gated']
    register_moved()

    # mmengine looks packages of 'package::config' up in this closed list, by the name of a distribution, whose folder
    # it takes for the package's (in an editable install it is not), or else by that of a module: then its folder.
    MODULE2PACKAGE.setdefault('mmgate', 'mmgate.registry')
    try:
        distribution(MODULE2PACKAGE['mmseg'])
    except PackageNotFoundError:  # the fork's distribution has another name; mmengine then looks the module up
        MODULE2PACKAGE['mmseg'] = 'mmseg'  # (mmpretrain's entry is that of the module already)
