"""Backbones with agent and SAGA attention."""

from .pvt import SAGAPVT, AgentPVT, SAGAPVTv2
from .swin import AgentSwin, SAGASwin

__all__ = ['AgentPVT', 'AgentSwin', 'SAGAPVT', 'SAGAPVTv2', 'SAGASwin']
