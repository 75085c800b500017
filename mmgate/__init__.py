"""Gated and linear attention for mmdetection and mmsegmentation.

``import mmgate`` registers every component under the scope ``mmgate`` and makes ``_base_ = 'mmgate::...'`` resolve.
"""

from ._environment import check_environment

check_environment()

from mmengine.config.utils import MODULE2PACKAGE  # noqa: E402

from . import layers, models  # noqa: E402, F401
from .models import Gated, swap_attention  # noqa: E402

# mmengine looks packages of 'package::config' up in this closed list.
MODULE2PACKAGE.setdefault('mmgate', 'mmgate')

__version__ = '0.1.0'
__all__ = ['Gated', '__version__', 'swap_attention']
