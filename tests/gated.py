"""torch's attention with a gate in it, by one call."""

from __future__ import annotations

from typing import Any

from torch import nn

from mmgate.layers.base.dense import DenseGate, make_gated

OF_TORCH = ('bias', 'add_bias_kv', 'add_zero_attn', 'kdim', 'vdim', 'batch_first', 'device', 'dtype')


def gated_attention(
    gate: type[DenseGate], channels: int, heads: int, dropout: float = 0.0, /, **options: Any
) -> Any:
    """Return ``torch.nn.MultiheadAttention`` with a gate; options are torch's and the gate's."""
    of_torch = {name: options.pop(name) for name in OF_TORCH if name in options}
    return make_gated(nn.MultiheadAttention(channels, heads, dropout, **of_torch), gate, **options)
