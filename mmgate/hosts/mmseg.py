"""Adapters that let gates into mmseg's attention modules (BEiT, MAE, Twins)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from mmseg.models.backbones.beit import BEiTAttention
from mmseg.models.backbones.mae import MAEAttention
from mmseg.models.backbones.mit import EfficientMultiheadAttention
from mmseg.models.backbones.swin import ShiftWindowMSA, WindowMSA
from mmseg.models.backbones.twins import GlobalSubsampledAttention, LocallyGroupedSelfAttention
from torch import Tensor, nn

from mmgate.gate import Sizes
from mmgate.gates.base.dense import DenseAdapter, DenseGate
from mmgate.gates.base.map import HeightWidth, MapAdapter, MapGate
from mmgate.hosts.table import adapts
from mmgate.hosts.torch import adapt_reduced, sizes_of_pyramid
from mmgate.hosts.window import adapt_swin

adapt_swin(WindowMSA, ShiftWindowMSA)
adapt_reduced(EfficientMultiheadAttention, GlobalSubsampledAttention)


@adapts(DenseGate, BEiTAttention, MAEAttention)
class BEiTAttentionAdapter(DenseAdapter):
    """Adapter that lets dense gates into mmseg's ``BEiTAttention`` and ``MAEAttention``.

    The relative position bias is added after the gate.
    """

    num_heads: int
    bias: Any
    q_bias: Tensor
    v_bias: Tensor
    relative_position_bias_table: Tensor
    relative_position_index: Tensor
    qkv: nn.Linear
    proj: nn.Module
    proj_drop: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        """Attend over the tokens ``(B, N, C)``, the class token first, with the gate."""
        bias: Any = self.qkv.bias
        if self.bias == 'qv_bias':
            bias = torch.cat((self.q_bias, torch.zeros_like(self.v_bias), self.v_bias))
        projected = F.linear(x, self.qkv.weight, bias)
        query, key, value = projected.unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)  # (B, H, N, d)
        position = self.relative_position_bias_table[self.relative_position_index]  # (N, N, H)
        position = position.permute(2, 0, 1)[None].to(query.dtype)
        return self.proj_drop(self.attend_gated((query, key, value), (x, x, x), self.proj, position))


@adapts(DenseGate, LocallyGroupedSelfAttention)
class LocallyGroupedSelfAttentionAdapter(DenseAdapter):
    """Adapter that lets dense gates into the windows of Twins' ``LocallyGroupedSelfAttention``."""

    num_heads: int
    window_size: int
    qkv: nn.Module
    proj: nn.Module
    proj_drop: nn.Module

    def forward(self, x: Tensor, hw_shape: tuple[int, int]) -> Tensor:
        """Attend inside the windows of a map of tokens ``(B, H W, C)``, with the gate."""
        height, width = hw_shape
        side = self.window_size
        bottom = -height % side
        right = -width % side
        map_ = F.pad(x.unflatten(1, (height, width)), (0, 0, 0, right, 0, bottom))  # (B, H', W', C)
        rows = map_.shape[1] // side
        columns = map_.shape[2] // side
        windows = self._windows(map_, rows, columns)  # (B nW, N, C)
        query, key, value = self.qkv(windows).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        bias = None
        # The host masks padding only if there is some both below and on the right: where one is 0, its slice from -0
        # marks the whole map as padding, which masks nothing.
        if bottom and right:
            padded = map_.new_ones(1, rows * side, columns * side, 1)
            padded[:, :height, :width] = 0
            padded = self._windows(padded, rows, columns)  # (nW, N, 1)
            bias = -1000.0 * (padded != padded.transpose(1, 2)).to(query.dtype)[:, None]
            bias = bias.repeat(x.shape[0], 1, 1, 1)
        out = self.attend_gated((query, key, value), (windows, windows, windows), self.proj, bias)
        out = out.unflatten(0, (-1, rows, columns)).unflatten(3, (side, side)).transpose(2, 3)
        out = out.flatten(3, 4).flatten(1, 2)[:, :height, :width]  # (B, H, W, C)
        return self.proj_drop(out.flatten(1, 2))

    def _windows(self, map_: Tensor, rows: int, columns: int) -> Tensor:
        side = self.window_size
        windows = map_.unflatten(2, (columns, side)).unflatten(1, (rows, side)).transpose(2, 3)
        return windows.flatten(3, 4).flatten(0, 2)  # (B nW, N, C)


@adapts(MapGate, LocallyGroupedSelfAttention)
class UngroupedSelfAttention(MapAdapter):
    """Adapter that lets attention over the whole map replace Twins' ``LocallyGroupedSelfAttention``."""

    proj: nn.Module
    proj_drop: nn.Module

    @classmethod
    def sizes(cls, host: Any) -> Sizes:
        """Read channels and heads off an attention module (the host), for its gate."""
        bias = host.qkv.bias is not None
        return Sizes(host.embed_dims, host.num_heads, dropout=host.attn_drop.p, scale=host.scale, bias=bias)

    @classmethod
    def sizes_from_model(cls, model: nn.Module, path: str) -> dict[str, Any]:
        """Return the stride of the stage."""
        return sizes_of_pyramid(model, path)

    def finish(self, x: Tensor) -> Tensor:
        """Project the mixed tokens to the output and apply the host's dropout."""
        return self.proj_drop(self.proj(x))

    def forward(self, x: Tensor, hw_shape: HeightWidth) -> Tensor:
        """Attend over all tokens ``(B, N, C)`` of a map of height and width ``hw_shape``, with the gate."""
        return self.attend_gated(x, hw_shape)
