"""Attention layers, one file per paper; importing them registers them."""

from mmgate.layers.base.deformable import MultiScaleDeformableAttention

from .agent import AgentAttention
from .cross_window import CrossWindowAttention
from .dgsa import DGSAGate, DifferentialGatedMultiheadAttention
from .differential import DifferentialGate, DifferentialMultiheadAttention
from .gml import GatingModulation
from .linear.angular import LinearAngularAttention
from .linear.efficient import EfficientAttention
from .linear.enhanced import EnhancedLinearAttention
from .linear.focused import FocusedLinearAttention
from .linear.hydra import HydraAttention
from .linear.inline import InLineAttention
from .linear.mlla import MLLAAttention
from .linear.polaformer import PolaFormerAttention
from .linear.rala import RALAAttention
from .plug import PLuGDeformableGate, PLuGMultiScaleDeformableAttention
from .plug_dense import PLuGGate, PLuGMultiheadAttention
from .saga import SAGAAttention
from .sdpa_gate import SDPAGate, SDPAGatedMultiheadAttention
from .softmax import SoftmaxAttention

__all__ = [
    'AgentAttention',
    'CrossWindowAttention',
    'DGSAGate',
    'DifferentialGate',
    'DifferentialGatedMultiheadAttention',
    'DifferentialMultiheadAttention',
    'EfficientAttention',
    'EnhancedLinearAttention',
    'FocusedLinearAttention',
    'GatingModulation',
    'HydraAttention',
    'InLineAttention',
    'LinearAngularAttention',
    'MLLAAttention',
    'MultiScaleDeformableAttention',
    'PLuGDeformableGate',
    'PLuGGate',
    'PLuGMultiScaleDeformableAttention',
    'PLuGMultiheadAttention',
    'PolaFormerAttention',
    'RALAAttention',
    'SAGAAttention',
    'SDPAGate',
    'SDPAGatedMultiheadAttention',
    'SoftmaxAttention',
]
