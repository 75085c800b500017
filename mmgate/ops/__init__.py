"""Operators: pure functions of tensors, such as deformable attention, that need nothing but torch."""

from .agent import agent_attention
from .deformable import ms_deform_attn
from .dense import plug_attention
from .differential import differential_attention
from .gated_linear import gated_linear_attention

__all__ = ['agent_attention', 'differential_attention', 'gated_linear_attention', 'ms_deform_attn', 'plug_attention']
