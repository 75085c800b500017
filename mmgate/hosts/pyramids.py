"""What several packages have, of the same attributes, as hosts: Swin's windows, and attentions over a reduced map."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from torch import nn

from mmgate.hosts.core import attend_over_map, own_scale
from mmgate.hosts.table import adapts
from mmgate.hosts.torch import multihead_attention as torch_host
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
        return GatedWindowMSA(core, host)

    @adapts(MapAttention, shift_window_msa)
    def whole_map(gate: type[MapAttention], host: Any, /, **options: Any) -> MapAttention:
        windows: Any = host.w_msa
        kind = type(windows)
        if kind is not window_msa:
            raise ValueError(
                f'{gate.__name__} does not replace a {type(host).__name__} around a {kind.__name__}: it would '
                f'lose what that computes beyond a {window_msa.__name__}.'
            )
        module = attend_over_map(gate, windows, **options)
        module.dropout_layer, module.shifted = host.drop, host.shift_size > 0
        return module


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
        sizes = dict(qkv_bias=host.attn.in_proj_bias is not None, attn_drop=host.attn.dropout)
        module = gate(host.embed_dims, host.num_heads, **sizes, proj_drop=host.proj_drop.p, **options)
        module.dropout_layer = host.dropout_layer
        return module
