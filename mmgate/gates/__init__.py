"""Gates and the attention modules that have them, one file for each paper; importing this registers the modules."""

from typing import Any

from mmgate.gates.base.deformable import MultiScaleDeformableAttention
from mmgate.gates.base.map import SoftmaxAttention, SoftmaxGate
from mmgate.moved import how_to_import

from .agent import AgentAttention, AgentGate
from .dgsa import DGSAGate, DifferentialGatedMultiheadAttention
from .differential import (
    DifferentialGate,
    DifferentialMultiheadAttention,
    DifferentialV2Gate,
    DifferentialV2MultiheadAttention,
)
from .plug import (
    GatingModulation,
    PLuGDeformableGate,
    PLuGGate,
    PLuGMultiheadAttention,
    PLuGMultiScaleDeformableAttention,
)
from .saga import SAGAAttention, SAGAGate
from .sdpa_gate import SDPAGate, SDPAGatedMultiheadAttention


def __getattr__(name: str) -> Any:
    message = how_to_import(name)
    if message is None:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    raise ImportError(message)


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
