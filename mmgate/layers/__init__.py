"""Attention layers, one file per paper; importing them registers them."""

from .dgsa import DifferentialGatedAttention, DifferentialGatedMultiheadAttention
from .gml import GatingModulation
from .plug import PLuGMultiScaleDeformableAttention
from .plug_dense import PLuGAttention, PLuGMultiheadAttention
from .sdpa_gate import SDPAGatedAttention, SDPAGatedMultiheadAttention

__all__ = [
    'DifferentialGatedAttention',
    'DifferentialGatedMultiheadAttention',
    'GatingModulation',
    'PLuGAttention',
    'PLuGMultiScaleDeformableAttention',
    'PLuGMultiheadAttention',
    'SDPAGatedAttention',
    'SDPAGatedMultiheadAttention',
]
