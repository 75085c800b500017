"""Attention layers, one file per paper; importing them registers them."""

from .agent import AgentAttention
from .dgsa import DifferentialGatedAttention, DifferentialGatedMultiheadAttention
from .gml import GatingModulation
from .ms_deform_attn import MultiScaleDeformableAttention
from .plug import PLuGMultiScaleDeformableAttention
from .plug_dense import PLuGAttention, PLuGMultiheadAttention
from .saga import SAGAAttention
from .sdpa_gate import SDPAGatedAttention, SDPAGatedMultiheadAttention

__all__ = [
    'AgentAttention',
    'DifferentialGatedAttention',
    'DifferentialGatedMultiheadAttention',
    'GatingModulation',
    'MultiScaleDeformableAttention',
    'PLuGAttention',
    'PLuGMultiScaleDeformableAttention',
    'PLuGMultiheadAttention',
    'SAGAAttention',
    'SDPAGatedAttention',
    'SDPAGatedMultiheadAttention',
]
