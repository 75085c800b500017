"""Linear attentions of other papers, one file each, with which Agent attention and SAGA are compared.

Importing this registers them, and the backbones where mmdet is installed.
"""

from importlib.util import find_spec

from .angular import LinearAngularAttention
from .efficient import EfficientAttention
from .enhanced import EnhancedLinearAttention
from .focused import FocusedLinearAttention
from .hydra import HydraAttention
from .inline import InLineAttention
from .mlla import MLLAAttention
from .polaformer import PolaFormerAttention
from .rala import RALAAttention

__all__ = [
    'EfficientAttention',
    'EnhancedLinearAttention',
    'FocusedLinearAttention',
    'HydraAttention',
    'InLineAttention',
    'LinearAngularAttention',
    'MLLAAttention',
    'PolaFormerAttention',
    'RALAAttention',
]
if find_spec('mmdet'):
    from .backbones import LinearPVT, LinearPVTv2, LinearSwin

    __all__ += ['LinearPVT', 'LinearPVTv2', 'LinearSwin']
