"""mmdet's attentions as hosts."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from mmdet.models.backbones.pvt import SpatialReductionAttention
from mmdet.models.backbones.swin import ShiftWindowMSA, WindowMSA

from mmgate.layers.dense import GatedMultiheadAttention
from mmgate.layers.map_attention import MapAttention

from .pairs import adapts
from .swin import adapt_swin
from .torch import multihead_attention as torch_host

adapt_swin(WindowMSA, ShiftWindowMSA)


@adapts(GatedMultiheadAttention, SpatialReductionAttention)
def reduced_attention(
    gate: type[GatedMultiheadAttention], host: SpatialReductionAttention, **options: Any
) -> SpatialReductionAttention:
    """Return PVT's module with the attention in it gated; the spatial reduction stays."""
    gated = deepcopy(host)
    gated.attn = torch_host(gate, host.attn, **options)
    return gated


@adapts(MapAttention, SpatialReductionAttention)
def unreduced_attention(gate: type[MapAttention], host: SpatialReductionAttention, **options: Any) -> MapAttention:
    """Take over sizes and dropouts.

    Raises:
        ValueError: The host reduces its map, which attentions over the whole map do not.
    """
    if host.sr_ratio != 1:
        raise ValueError(
            f'{gate.__name__} reduces no map, but this attention has sr_ratio={host.sr_ratio}; '
            'set sr_ratios=(1, 1, 1, 1) in the backbone.'
        )
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
