"""Operators: pure functions of tensors, such as deformable attention, that need nothing but torch."""

from .agent_attention import agent_attention
from .differential_attention import differential_attention
from .gated_linear_attention import gated_linear_attention
from .ms_deform_attn import ms_deform_attn
from .plug_attention import plug_attention

__all__ = ['agent_attention', 'differential_attention', 'gated_linear_attention', 'ms_deform_attn', 'plug_attention']
