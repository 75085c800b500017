"""Gates and the attention modules that have them, one file for each paper; importing this registers the modules."""

from mmgate.gates.base.deformable import MultiScaleDeformableAttention

from .agent import AgentAttention, AgentGate
from .cross_window import CrossWindowAttention, CrossWindowGate
from .dgsa import DGSAGate, DifferentialGatedMultiheadAttention
from .differential import (
    DifferentialGate,
    DifferentialMultiheadAttention,
    DifferentialV2Gate,
    DifferentialV2MultiheadAttention,
)
from .gml import GatingModulation
from .linear.angular import LinearAngularAttention, LinearAngularGate
from .linear.efficient import EfficientAttention, EfficientGate
from .linear.enhanced import EnhancedLinearAttention, EnhancedLinearGate
from .linear.focused import FocusedLinearAttention, FocusedLinearGate
from .linear.hydra import HydraAttention, HydraGate
from .linear.inline import InLineAttention, InLineGate
from .linear.mlla import MLLAAttention, MLLAGate
from .linear.polaformer import PolaFormerAttention, PolaFormerGate
from .linear.rala import RALAAttention, RALAGate
from .plug import PLuGDeformableGate, PLuGMultiScaleDeformableAttention
from .plug_dense import PLuGGate, PLuGMultiheadAttention
from .saga import SAGAAttention, SAGAGate
from .sdpa_gate import SDPAGate, SDPAGatedMultiheadAttention
from .softmax import SoftmaxAttention, SoftmaxGate

__all__ = [
    'AgentAttention',
    'AgentGate',
    'CrossWindowAttention',
    'CrossWindowGate',
    'DGSAGate',
    'DifferentialGate',
    'DifferentialGatedMultiheadAttention',
    'DifferentialMultiheadAttention',
    'DifferentialV2Gate',
    'DifferentialV2MultiheadAttention',
    'EfficientAttention',
    'EfficientGate',
    'EnhancedLinearAttention',
    'EnhancedLinearGate',
    'FocusedLinearAttention',
    'FocusedLinearGate',
    'GatingModulation',
    'HydraAttention',
    'HydraGate',
    'InLineAttention',
    'InLineGate',
    'LinearAngularAttention',
    'LinearAngularGate',
    'MLLAAttention',
    'MLLAGate',
    'MultiScaleDeformableAttention',
    'PLuGDeformableGate',
    'PLuGGate',
    'PLuGMultiScaleDeformableAttention',
    'PLuGMultiheadAttention',
    'PolaFormerAttention',
    'PolaFormerGate',
    'RALAAttention',
    'RALAGate',
    'SAGAAttention',
    'SAGAGate',
    'SDPAGate',
    'SDPAGatedMultiheadAttention',
    'SoftmaxAttention',
    'SoftmaxGate',
]
