"""Linear attentions to compare with, one file each; importing them registers them."""

from .angular import LinearAngularAttention
from .base import LinearAttention
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
    'LinearAttention',
    'MLLAAttention',
    'PolaFormerAttention',
    'RALAAttention',
]
