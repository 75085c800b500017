"""Gated and linear attention for mmdetection and mmsegmentation.

``import mmgate`` registers every component under the scope ``mmgate`` and makes ``_base_ = 'mmgate::...'`` resolve.
"""

from ._environment import check_environment

check_environment()

from importlib.metadata import PackageNotFoundError, distribution  # noqa: E402

from mmengine.config.utils import MODULE2PACKAGE  # noqa: E402

from . import backbones, layers  # noqa: E402, F401
from .checkpoints.loading import register_safe_loader  # noqa: E402
from .gates import (  # noqa: E402
    Gated,
    gate_parameters,
    gates_disabled,
    load_gates,
    restore_attention,
    save_gates,
    train_only_gates,
)
from .hosts import adapts  # noqa: E402
from .swap import swap_attention  # noqa: E402

# mmengine looks packages of 'package::config' up in this closed list, by the name of a distribution, whose folder it
# takes for the package's (in an editable install it is not), or else by that of a module: then the module's folder.
MODULE2PACKAGE.setdefault('mmgate', 'mmgate.registry')
register_safe_loader()
try:
    distribution(MODULE2PACKAGE['mmseg'])
except PackageNotFoundError:  # the fork's distribution has another name; mmengine then looks the module up
    MODULE2PACKAGE['mmseg'] = 'mmseg'  # (mmpretrain's entry is that of the module already)

__version__ = '0.1.0'
__all__ = [
    'Gated',
    '__version__',
    'adapts',
    'gate_parameters',
    'gates_disabled',
    'load_gates',
    'restore_attention',
    'save_gates',
    'swap_attention',
    'train_only_gates',
]
