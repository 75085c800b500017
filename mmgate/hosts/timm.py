"""Adapters of timm's attentions: Visformer, GCViT and PVTv2, in mmpretrain through its ``TIMMBackbone``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from timm.models.gcvit import WindowAttentionGlobal
from timm.models.pvt_v2 import Attention as PVTAttention
from timm.models.visformer import Attention as VisformerAttention
from torch import Tensor, nn

from mmgate.hosts.table import adapts
from mmgate.layers.base.dense import DenseGate, DenseHost
from mmgate.layers.base.gate import Sizes


class TimmHost(DenseHost):
    """Base of the adapters of timm's attentions."""

    num_heads: int
    qkv: nn.Module
    proj: nn.Module
    proj_drop: nn.Module

    @classmethod
    def sizes(cls, host: Any) -> Sizes:
        """Return the sizes of a host, by the names that timm gives them."""
        channels = host.head_dim * host.num_heads
        width = getattr(host, 'dim', channels)
        inputs = (width, width, width)
        return Sizes(channels, host.num_heads, inputs=inputs, output=width, dropout=host.attn_drop.p)


@adapts(DenseGate, VisformerAttention)
class GatedVisformerAttention(TimmHost):
    """Adapter of Visformer's attention, whose projections are convolutions."""

    def forward(self, x: Tensor) -> Tensor:
        """Attend over a map ``(B, C, h, w)``."""
        size = x.shape[2:]
        query, key, value = self.qkv(x).flatten(2).unflatten(1, (3, self.num_heads, -1)).permute(1, 0, 2, 4, 3)
        tokens = x.flatten(2).transpose(1, 2)  # (B, N, C)

        def project(heads: Tensor) -> Tensor:
            return self.proj(heads.transpose(1, 2).unflatten(-1, size)).flatten(2).transpose(1, 2)

        out = self.attend_gated((query, key, value), (tokens, tokens, tokens), project)
        return self.proj_drop(out.transpose(1, 2).unflatten(-1, size))


def shares_by_image(forward: Callable[..., Any]) -> bool:
    """Return True if a host gives an image's global queries to the windows of that image.

    timm up to 1.0.29 repeats the batch instead, which mixes images where there are several.
    """
    return 'repeat_interleave' in forward.__code__.co_names


BY_IMAGE = shares_by_image(WindowAttentionGlobal.forward)


@adapts(DenseGate, WindowAttentionGlobal)
class GatedWindowAttentionGlobal(TimmHost):
    """Adapter of GCViT's attention in windows; the bias of positions is added after the gate.

    Global queries are the image's, shared by its windows and not projected. They are then the gate's query input, too.
    """

    def forward(self, x: Tensor, q_global: Tensor | None = None) -> Tensor:
        """Attend within windows ``(B nW, N, C)``, by the queries of ``q_global`` ``(B, ..., C)`` if they are given."""
        if self.use_global and q_global is not None:
            windows = len(x) // len(q_global)
            asked = q_global.repeat_interleave(windows, 0) if BY_IMAGE else q_global.repeat(windows, 1, 1, 1)
            asked = asked.reshape(x.shape)
            key, value = self.qkv(x).unflatten(-1, (2, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
            # The queries are not projected, which under autocast would have cast them.
            query = self.gate.split_heads(asked).to(key.dtype)
        else:
            asked = x
            query, key, value = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        bias = self.rel_pos.get_bias().to(query.dtype)
        return self.proj_drop(self.attend_gated((query, key, value), (asked, x, x), self.proj, bias))


@adapts(DenseGate, PVTAttention)
class GatedPVTAttention(TimmHost):
    """Adapter of PVTv2's attention; keys and values stay those of the reduced map."""

    def forward(self, x: Tensor, feat_size: list[int]) -> Tensor:
        """Attend from ``(B, N, C)`` tokens of a map of ``feat_size`` to those of the reduced one."""
        reduced = x
        if self.sr is not None:
            grid = x.transpose(1, 2).unflatten(-1, tuple(feat_size))
            grid = self.sr(grid if self.pool is None else self.pool(grid))
            reduced = self.norm(grid.flatten(2).transpose(1, 2))
            reduced = reduced if self.act is None else self.act(reduced)
        query = self.gate.split_heads(self.q(x))
        key, value = self.kv(reduced).unflatten(-1, (2, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        return self.proj_drop(self.attend_gated((query, key, value), (x, reduced, reduced), self.proj))
