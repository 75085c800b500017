"""Attentions over a reduced map as hosts; mmdet's PVT, mmseg's SegFormer and Twins have the same attributes."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from torch import nn

from mmgate.hosts.table import adapts
from mmgate.hosts.torch import multihead_attention as torch_host
from mmgate.layers.base.dense import GatedMultiheadAttention
from mmgate.layers.base.map import MapAttention


def adapt_reduced(*hosts: type[nn.Module]) -> None:
    """Let dense gates replace ``hosts``, and attentions over the whole map, which need no reduced one."""

    @adapts(GatedMultiheadAttention, *hosts)
    def reduced_attention(gate: type[GatedMultiheadAttention], host: Any, /, **options: Any) -> nn.Module:
        """Return the host's module with the attention in it gated; the spatial reduction stays."""
        gated = deepcopy(host)
        gated.attn = torch_host(gate, host.attn, **options)
        return gated

    @adapts(MapAttention, *hosts)
    def unreduced_attention(gate: type[MapAttention], host: Any, /, **options: Any) -> MapAttention:
        module = gate(
            host.embed_dims,
            host.num_heads,
            qkv_bias=host.attn.in_proj_bias is not None,
            attn_drop=host.attn.dropout,
            proj_drop=host.proj_drop.p,
            **options,
        )
        module.dropout_layer = host.dropout_layer
        return module
