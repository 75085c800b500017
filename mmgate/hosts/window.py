"""Swin's windows as hosts: gated attention inside them, and attention over the whole map in their place."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from mmgate.hosts.core import attend_over_map, own_scale
from mmgate.hosts.table import adapts
from mmgate.layers.base.dense import DenseAttention, GatedMultiheadAttention
from mmgate.layers.base.map import MapAttention

RENAMED = {
    'qkv.weight': 'attn.in_proj_weight',
    'qkv.bias': 'attn.in_proj_bias',
    'proj.weight': 'attn.out_proj.weight',
    'proj.bias': 'attn.out_proj.bias',
}


class Renamed(nn.Module):
    """Base of what stands for a host around a gated attention ``attn``, which takes over the host's projections."""

    def _load_from_state_dict(
        self, state_dict: MutableMapping[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        for old, new in RENAMED.items():
            if prefix + old in state_dict:
                state_dict[prefix + new] = state_dict.pop(prefix + old)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


class GatedWindowMSA(Renamed):
    """Drop-in for mmdet's, mmseg's and mmpretrain's ``WindowMSA`` around a gated attention.

    The relative position bias and the mask ``(nW, N, N)`` of shifted windows are added to the logits after the gate.

    Args:
        attn: The gated attention, ``batch_first``; takes over the host's projections.
        host: The ``WindowMSA``, for its window's size, positions and dropout.
    """

    relative_position_index: Tensor

    def __init__(self, attn: DenseAttention, host: Any) -> None:
        super().__init__()
        self.attn, self.proj_drop = attn, host.proj_drop
        self.window_size, self.tokens = host.window_size, host.window_size[0] * host.window_size[1]
        self.relative_position_bias_table = nn.Parameter(torch.zeros_like(host.relative_position_bias_table))
        self.register_buffer('relative_position_index', host.relative_position_index.clone())

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend within windows ``(B nW, N, C)``, those of an image next to each other."""
        table, index = self.relative_position_bias_table, self.relative_position_index
        bias = table[index.flatten()].view(self.tokens, self.tokens, -1).permute(2, 0, 1)[None]  # (1, H, N, N)
        if mask is not None:
            bias = (bias + mask[:, None]).repeat(x.shape[0] // mask.shape[0], 1, 1, 1)
        inputs = (x, x, x)
        q, k, v = self.attn.project(inputs)
        heads = self.attn.attend(q, k, v, inputs, bias.to(q.dtype))
        return self.proj_drop(self.attn.merge(heads, q, inputs))


def adapt_swin(window_msa: type[nn.Module], shift_window_msa: type[nn.Module]) -> None:
    """Let dense gates replace ``window_msa``, and attentions over the whole map ``shift_window_msa``."""

    @adapts(GatedMultiheadAttention, window_msa)
    def windows(gate: type[GatedMultiheadAttention], host: Any, /, **options: Any) -> GatedWindowMSA:
        if reason := own_scale(host):
            raise ValueError(f'{gate.__name__} {reason}')
        core = gate.core(host.embed_dims, host.num_heads, host.attn_drop.p, batch_first=True, **options)
        if host.qkv.bias is None:  # torch's class has both biases or none
            core.register_parameter('in_proj_bias', None)
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
