"""torch's own MultiheadAttention as a host."""

from __future__ import annotations

from typing import Any

from torch import nn

from mmgate.hosts.table import adapts
from mmgate.layers.base.dense import DenseAttention, GatedMultiheadAttention


@adapts(GatedMultiheadAttention, nn.MultiheadAttention)
def multihead_attention(
    gate: type[GatedMultiheadAttention], host: nn.MultiheadAttention, /, **options: Any
) -> DenseAttention:
    """Return the gate's core; the gate's one name serves torch's class and mmcv's around it.

    Raises:
        ValueError: The host has an extra that the core lacks.
    """
    extras = dict(add_bias_kv=host.bias_k is not None, add_zero_attn=host.add_zero_attn)
    refused = [name for name, used in extras.items() if used]
    if refused:
        raise ValueError(f'{gate.__name__} does not replace a MultiheadAttention with {", ".join(refused)}.')
    has_bias = host.in_proj_bias is not None
    inputs = dict(kdim=host.kdim, vdim=host.vdim, batch_first=host.batch_first)
    return gate.core(host.embed_dim, host.num_heads, host.dropout, bias=has_bias, **inputs, **options)
