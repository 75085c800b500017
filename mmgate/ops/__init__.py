"""Operators: pure functions of tensors that import torch only."""

from .differential_attention import differential_attention
from .ms_deform_attn import ms_deform_attn
from .plug_attention import plug_attention

__all__ = ['differential_attention', 'ms_deform_attn', 'plug_attention']
