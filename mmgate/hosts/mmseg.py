"""mmseg's attentions as hosts."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from mmseg.models.backbones.beit import BEiTAttention
from mmseg.models.backbones.mae import MAEAttention
from mmseg.models.backbones.mit import EfficientMultiheadAttention
from mmseg.models.backbones.swin import ShiftWindowMSA, WindowMSA
from mmseg.models.backbones.twins import GlobalSubsampledAttention, LocallyGroupedSelfAttention
from torch import Tensor

from mmgate.hosts.core import attend_in_host, attend_over_map, holds_gates, own_scale
from mmgate.hosts.table import adapts
from mmgate.hosts.torch import adapt_reduced
from mmgate.hosts.window import adapt_swin
from mmgate.layers.base.map import MapAttention

adapt_swin(WindowMSA, ShiftWindowMSA)
adapt_reduced(EfficientMultiheadAttention, GlobalSubsampledAttention)


@holds_gates(BEiTAttention, refuses=own_scale)
class GatedBEiTAttention(BEiTAttention):
    """Drop-in for ``BEiTAttention`` that holds a gate; the relative position bias is added after it."""

    gate: Any

    def forward(self, x: Tensor) -> Tensor:
        """Attend over ``(B, N, C)``, class token first."""
        bias = self.qkv.bias
        if self.bias == 'qv_bias':
            bias = torch.cat((self.q_bias, torch.zeros_like(self.v_bias), self.v_bias))
        projected = F.linear(x, self.qkv.weight, bias)
        query, key, value = projected.unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)  # (B, H, N, d)
        position = self.relative_position_bias_table[self.relative_position_index]  # (N, N, H)
        position = position.permute(2, 0, 1)[None].to(query.dtype)
        return self.proj_drop(attend_in_host(self.gate, (query, key, value), (x, x, x), self.proj, position))


@holds_gates(MAEAttention, refuses=own_scale)
class GatedMAEAttention(GatedBEiTAttention, MAEAttention):
    """Drop-in for ``MAEAttention`` that holds a gate."""


@holds_gates(LocallyGroupedSelfAttention, refuses=own_scale)
class GatedLocallyGroupedSelfAttention(LocallyGroupedSelfAttention):
    """Drop-in for Twins' ``LocallyGroupedSelfAttention`` that holds a gate."""

    gate: Any

    def forward(self, x: Tensor, hw_shape: tuple[int, int]) -> Tensor:
        """Attend within windows of a map of tokens ``(B, H W, C)``."""
        (height, width), side = hw_shape, self.window_size
        bottom, right = -height % side, -width % side
        map_ = F.pad(x.unflatten(1, (height, width)), (0, 0, 0, right, 0, bottom))  # (B, H', W', C)
        rows, columns = map_.shape[1] // side, map_.shape[2] // side
        windows = self._windows(map_, rows, columns)  # (B nW, N, C)
        query, key, value = self.qkv(windows).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        bias = None
        # The host masks padding only where both sides have some; a slice from -0 marks its whole map as padding.
        if bottom and right:
            padded = map_.new_ones(1, rows * side, columns * side, 1)
            padded[:, :height, :width] = 0
            padded = self._windows(padded, rows, columns)  # (nW, N, 1)
            bias = -1000.0 * (padded != padded.transpose(1, 2)).to(query.dtype)[:, None]
            bias = bias.repeat(x.shape[0], 1, 1, 1)
        out = attend_in_host(self.gate, (query, key, value), (windows, windows, windows), self.proj, bias)
        out = out.unflatten(0, (-1, rows, columns)).unflatten(3, (side, side)).transpose(2, 3)
        out = out.flatten(3, 4).flatten(1, 2)[:, :height, :width]  # (B, H, W, C)
        return self.proj_drop(out.flatten(1, 2))

    def _windows(self, map_: Tensor, rows: int, columns: int) -> Tensor:
        side = self.window_size
        windows = map_.unflatten(2, (columns, side)).unflatten(1, (rows, side)).transpose(2, 3)
        return windows.flatten(3, 4).flatten(0, 2)  # (B nW, N, C)


adapts(MapAttention, LocallyGroupedSelfAttention)(attend_over_map)  # the whole map in the place of windows, as in Swin
