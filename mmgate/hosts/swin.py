"""Swin's attentions as hosts; mmdet, mmseg and mmpretrain each have the classes, of the same attributes."""

from __future__ import annotations

from typing import Any

from torch import nn

from mmgate.hosts.core import own_scale
from mmgate.hosts.table import adapts
from mmgate.hosts.window import GatedWindowMSA
from mmgate.layers.base.dense import GatedMultiheadAttention
from mmgate.layers.base.map import MapAttention


def adapt_swin(window_msa: type[nn.Module], shift_window_msa: type[nn.Module]) -> None:
    """Let dense gates replace ``window_msa``, and attentions over the whole map ``shift_window_msa``."""

    @adapts(GatedMultiheadAttention, window_msa)
    def windows(gate: type[GatedMultiheadAttention], host: Any, /, **options: Any) -> GatedWindowMSA:
        if reason := own_scale(host):
            raise ValueError(f'{gate.__name__} {reason}')
        sizes = (host.embed_dims, host.num_heads, host.attn_drop.p)
        core = gate.core(*sizes, bias=host.qkv.bias is not None, batch_first=True, **options)
        return GatedWindowMSA(core, host.window_size, host.proj_drop.p)

    @adapts(MapAttention, shift_window_msa)
    def whole_map(gate: type[MapAttention], host: Any, /, **options: Any) -> MapAttention:
        windows: Any = host.w_msa
        kind = type(windows)
        if kind is not window_msa:
            raise ValueError(
                f'{gate.__name__} does not replace a {type(host).__name__} around a {kind.__name__}: it would '
                f'lose what that computes beyond a {window_msa.__name__}.'
            )
        module = attend_over_map(gate, windows, host.drop, **options)
        module.shifted = host.shift_size > 0
        return module


def attend_over_map(
    gate: type[MapAttention], host: Any, dropout_layer: nn.Module | None = None, /, **options: Any
) -> MapAttention:
    """Return a gate with sizes, scale and dropouts of ``host``, which attends within windows."""
    module = gate(
        host.embed_dims,
        host.num_heads,
        qkv_bias=host.qkv.bias is not None,
        qk_scale=host.scale,
        attn_drop=host.attn_drop.p,
        proj_drop=host.proj_drop.p,
        **options,
    )
    module.dropout_layer = module.dropout_layer if dropout_layer is None else dropout_layer
    return module
