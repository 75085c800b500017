"""Operators: pure functions of tensors that import torch only."""

from .ms_deform_attn import ms_deform_attn

__all__ = ['ms_deform_attn']
