"""Gates and the attention modules that have them, one file for each paper; importing this registers the modules."""

from mmgate.gates.base.deformable import MultiScaleDeformableAttention
from mmgate.gates.base.map import SoftmaxAttention, SoftmaxGate

from .agent import AgentAttention, AgentGate
from .dgsa import DGSAGate, DifferentialGatedMultiheadAttention
from .differential import (
    DifferentialGate,
    DifferentialMultiheadAttention,
    DifferentialV2Gate,
    DifferentialV2MultiheadAttention,
)
from .gml import GatingModulation
from .plug import PLuGDeformableGate, PLuGMultiScaleDeformableAttention
from .plug_dense import PLuGGate, PLuGMultiheadAttention
from .saga import SAGAAttention, SAGAGate
from .sdpa_gate import SDPAGate, SDPAGatedMultiheadAttention

__all__ = [
    'AgentAttention',
    'AgentGate',
    'DGSAGate',
    'DifferentialGate',
    'DifferentialGatedMultiheadAttention',
    'DifferentialMultiheadAttention',
    'DifferentialV2Gate',
    'DifferentialV2MultiheadAttention',
    'GatingModulation',
    'MultiScaleDeformableAttention',
    'PLuGDeformableGate',
    'PLuGGate',
    'PLuGMultiScaleDeformableAttention',
    'PLuGMultiheadAttention',
    'SAGAAttention',
    'SAGAGate',
    'SDPAGate',
    'SDPAGatedMultiheadAttention',
    'SoftmaxAttention',
    'SoftmaxGate',
]
