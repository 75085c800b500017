"""Attention layers, one file per paper; importing them registers them."""

from .gml import GatingModulation
from .plug import PLuGMultiScaleDeformableAttention

__all__ = ['GatingModulation', 'PLuGMultiScaleDeformableAttention']
