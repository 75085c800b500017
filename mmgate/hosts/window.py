"""Gated attention inside Swin's windows."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from mmgate.layers.base.dense import DenseAttention

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

    The relative position bias and the mask of shifted windows are added to the logits after the gate.

    Args:
        attn: The gated attention, ``batch_first``; takes over the host's projections.
        window_size: Height and width of a window.
        proj_drop: Dropout after the output projection.
    """

    def __init__(self, attn: DenseAttention, window_size: tuple[int, int], proj_drop: float = 0.0) -> None:
        super().__init__()
        self.relative_position_index: Tensor
        (height, width), self.attn = window_size, attn
        self.window_size, self.tokens = (height, width), height * width
        self.relative_position_bias_table = nn.Parameter(
            torch.zeros((2 * height - 1) * (2 * width - 1), attn.num_heads)
        )
        self.register_buffer('relative_position_index', _relative_positions(height, width))
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend within windows.

        Args:
            x: Windows ``(B nW, N, C)``, those of an image next to each other.
            mask: ``(nW, N, N)``, added to the logits.
        """
        table, index = self.relative_position_bias_table, self.relative_position_index
        bias = table[index.flatten()].view(self.tokens, self.tokens, -1).permute(2, 0, 1)[None]  # (1, H, N, N)
        if mask is not None:
            bias = (bias + mask[:, None]).repeat(x.shape[0] // mask.shape[0], 1, 1, 1)
        inputs = (x, x, x)
        q, k, v = self.attn.project(inputs)
        heads = self.attn.attend(q, k, v, inputs, bias.to(q.dtype))
        return self.proj_drop(self.attn.merge(heads, q, inputs))

    def _load_from_state_dict(
        self, state_dict: MutableMapping[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        # follows from the window's size, so that a state dict need not have it
        state_dict.setdefault(f'{prefix}relative_position_index', self.relative_position_index)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def _relative_positions(height: int, width: int) -> Tensor:
    """Return ``(N, N)``: the row of the bias table that belongs to a pair of positions of a window."""
    rows, columns = torch.arange(height).repeat_interleave(width), torch.arange(width).repeat(height)
    down = rows[:, None] - rows + height - 1
    right = columns[:, None] - columns + width - 1
    return down * (2 * width - 1) + right
