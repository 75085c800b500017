"""What a config names: models with their attention swapped, and backbones."""

from . import adapters  # noqa: F401  (registers which gate fits which host)
from .backbones import SAGAPVT, AgentPVT, AgentSwin, SAGAPVTv2, SAGASwin
from .classifier import Classifier
from .gated import Gated, attention_modules, swap_attention

__all__ = [
    'AgentPVT',
    'AgentSwin',
    'Classifier',
    'Gated',
    'SAGAPVT',
    'SAGAPVTv2',
    'SAGASwin',
    'attention_modules',
    'swap_attention',
]
