"""Attention layers, one file per paper; importing them registers them."""

from mmgate.layers.base.deformable import MultiScaleDeformableAttention

from .agent import AgentAttention
from .cross_window import CrossWindowAttention
from .dgsa import DifferentialGatedAttention, DifferentialGatedMultiheadAttention
from .differential import DifferentialAttention, DifferentialMultiheadAttention
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
from .plug import PLuGMultiScaleDeformableAttention
from .plug_dense import PLuGAttention, PLuGMultiheadAttention
from .saga import SAGAAttention
from .sdpa_gate import SDPAGatedAttention, SDPAGatedMultiheadAttention
from .softmax import SoftmaxAttention

__all__ = [
    'AgentAttention',
    'CrossWindowAttention',
    'DifferentialAttention',
    'DifferentialGatedAttention',
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
    'PLuGAttention',
    'PLuGMultiScaleDeformableAttention',
    'PLuGMultiheadAttention',
    'PolaFormerAttention',
    'RALAAttention',
    'SAGAAttention',
    'SDPAGatedAttention',
    'SDPAGatedMultiheadAttention',
    'SoftmaxAttention',
]
