"""Gated and linear attention for mmdetection and mmsegmentation.

``import mmgate`` lets mmengine find every component under the scope ``mmgate``, and makes ``_base_ = 'mmgate::...'``
resolve. Modules are imported as they are first used, so that this takes no time. Where mmengine is not installed there
are no configs: operators, layers, :func:`swap_attention` and gates as adapters work with torch alone.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from . import mmcv_ext
from ._environment import check_environment, without_mmengine

if TYPE_CHECKING:
    from .adapter import Adapter as Adapter
    from .errors import ConfigError as ConfigError
    from .files import load_gates as load_gates
    from .files import save_gates as save_gates
    from .gate import Gate as Gate
    from .gate import Sizes as Sizes
    from .gate import refuse_to_split as refuse_to_split
    from .gated import Gated as Gated
    from .gates.base.deformable import DeformableAdapter as DeformableAdapter
    from .gates.base.deformable import DeformableGate as DeformableGate
    from .gates.base.dense import DenseAdapter as DenseAdapter
    from .gates.base.dense import DenseGate as DenseGate
    from .gates.base.linear import LinearGate as LinearGate
    from .gates.base.map import MapAdapter as MapAdapter
    from .gates.base.map import MapGate as MapGate
    from .gates.base.map import map_attention as map_attention
    from .hosts import adapts as adapts
    from .hosts.from_model import nearest_with as nearest_with
    from .listing import list_attention as list_attention
    from .notes import note as note
    from .recording import record as record
    from .registry import MODELS as MODELS
    from .removal import gates_disabled as gates_disabled
    from .removal import restore_attention as restore_attention
    from .swap import swap_attention as swap_attention
    from .training import gate_parameters as gate_parameters
    from .training import train_only_gates as train_only_gates

__version__ = '0.3.0'

# By module, the names that it gives to the package at their first use.
_NAMES = {
    'adapter': ['Adapter'],
    'errors': ['ConfigError'],
    'files': ['load_gates', 'save_gates'],
    'gate': ['Gate', 'Sizes', 'refuse_to_split'],
    'gated': ['Gated'],
    'gates.base.deformable': ['DeformableAdapter', 'DeformableGate'],
    'gates.base.dense': ['DenseAdapter', 'DenseGate'],
    'gates.base.linear': ['LinearGate'],
    'gates.base.map': ['MapAdapter', 'MapGate', 'map_attention'],
    'hosts': ['adapts'],
    'hosts.from_model': ['nearest_with'],
    'listing': ['list_attention'],
    'notes': ['note'],
    'recording': ['record'],
    'registry': ['MODELS'],
    'removal': ['gates_disabled', 'restore_attention'],
    'swap': ['swap_attention'],
    'training': ['gate_parameters', 'train_only_gates'],
}
if without_mmengine():
    del _NAMES['gated']  # builds from configs
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}
__all__ = ['__version__', *_MODULE_OF]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        found = getattr(import_module(f'{__name__}.{_MODULE_OF[name]}'), name)
        globals()[name] = found
        return found
    if name == 'Gated':
        check_environment()
    if not name.startswith('_') and find_spec(f'{__name__}.{name}'):
        return import_module(f'{__name__}.{name}')
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')


if not without_mmengine():
    from importlib.metadata import PackageNotFoundError, distribution

    mmcv_ext.provide()
    check_environment()

    from mmengine.config.utils import MODULE2PACKAGE

    from .moved import register_moved

    register_moved()

    # mmengine looks packages of 'package::config' up in this closed list, by the name of a distribution, whose folder
    # it takes for the package's (in an editable install it is not), or else by that of a module: then its folder.
    MODULE2PACKAGE.setdefault('mmgate', 'mmgate.registry')
    try:
        distribution(MODULE2PACKAGE['mmseg'])
    except PackageNotFoundError:  # the fork's distribution has another name; mmengine then looks the module up
        MODULE2PACKAGE['mmseg'] = 'mmseg'  # (mmpretrain's entry is that of the module already)
