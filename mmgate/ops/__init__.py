"""Operators: pure functions of tensors, such as deformable attention, that need nothing but torch."""

from .agent import agent_attention
from .deformable import ms_deform_attn
from .dense import plug_attention
from .differential import differential_attention
from .gated_linear import gated_linear_attention
from .linear_attention import kernel_attention, key_value_map

__all__ = [
    'agent_attention',
    'differential_attention',
    'gated_linear_attention',
    'kernel_attention',
    'key_value_map',
    'ms_deform_attn',
    'plug_attention',
]
