"""torch's own MultiheadAttention as a host, and what several packages have: one over a reduced map."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from torch import nn

from mmgate.hosts.table import adapts
from mmgate.layers.base.dense import DenseAttention, GatedMultiheadAttention
from mmgate.layers.base.map import MapAttention


@adapts(GatedMultiheadAttention, nn.MultiheadAttention)
def multihead_attention(
    gate: type[GatedMultiheadAttention], host: nn.MultiheadAttention, /, **options: Any
) -> DenseAttention:
    """Return the gate's core, which refuses what it lacks; the gate's one name serves torch's class and mmcv's."""
    extras = dict(add_bias_kv=host.bias_k is not None, add_zero_attn=host.add_zero_attn)
    sizes = dict(bias=host.in_proj_bias is not None, kdim=host.kdim, vdim=host.vdim, batch_first=host.batch_first)
    return gate.core(host.embed_dim, host.num_heads, host.dropout, **extras, **sizes, **options)


def adapt_reduced(*hosts: type[nn.Module]) -> None:
    """Let dense gates replace ``hosts``, and attentions over the whole map, which need no reduced one."""

    @adapts(GatedMultiheadAttention, *hosts)
    def reduced_attention(gate: type[GatedMultiheadAttention], host: Any, /, **options: Any) -> nn.Module:
        """Return the host's module with the attention in it gated; the spatial reduction stays."""
        gated = deepcopy(host)
        gated.attn = multihead_attention(gate, host.attn, **options)
        return gated

    @adapts(MapAttention, *hosts)
    def unreduced_attention(gate: type[MapAttention], host: Any, /, **options: Any) -> MapAttention:
        sizes = dict(qkv_bias=host.attn.in_proj_bias is not None, attn_drop=host.attn.dropout)
        module = gate(host.embed_dims, host.num_heads, **sizes, proj_drop=host.proj_drop.p, **options)
        module.dropout_layer = host.dropout_layer
        return module
