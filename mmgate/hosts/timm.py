"""timm's attentions as hosts: Visformer, GCViT and PVTv2, in mmpretrain through its ``TIMMBackbone``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from timm.models.gcvit import WindowAttentionGlobal
from timm.models.pvt_v2 import Attention as PVTAttention
from timm.models.visformer import Attention as VisformerAttention
from torch import Tensor

from mmgate.hosts.core import attend_in_host, holds_gates


def _sizes(host: Any) -> tuple[int, int, float]:
    return host.head_dim * host.num_heads, host.num_heads, host.attn_drop.p


@holds_gates(VisformerAttention, sizes=_sizes, width=lambda host: host.dim)
class GatedVisformerAttention(VisformerAttention):
    """Drop-in for Visformer's attention, whose projections are convolutions, that holds a gate."""

    gate: Any

    def forward(self, x: Tensor) -> Tensor:
        """Attend over a map ``(B, C, h, w)``."""
        size = x.shape[2:]
        query, key, value = self.qkv(x).flatten(2).unflatten(1, (3, self.num_heads, -1)).permute(1, 0, 2, 4, 3)
        tokens = x.flatten(2).transpose(1, 2)  # (B, N, C)

        def project(heads: Tensor) -> Tensor:
            return self.proj(heads.transpose(1, 2).unflatten(-1, size)).flatten(2).transpose(1, 2)

        out = attend_in_host(self.gate, (query, key, value), (tokens, tokens, tokens), project)
        return self.proj_drop(out.transpose(1, 2).unflatten(-1, size))


def shares_by_image(forward: Callable[..., Any]) -> bool:
    """Return whether a host gives an image's global queries to the windows of that image.

    timm up to 1.0.29 repeats the batch instead, which mixes images where there are several.
    """
    return 'repeat_interleave' in forward.__code__.co_names


BY_IMAGE = shares_by_image(WindowAttentionGlobal.forward)


@holds_gates(WindowAttentionGlobal, sizes=_sizes)
class GatedWindowAttentionGlobal(WindowAttentionGlobal):
    """Drop-in for GCViT's attention in windows that holds a gate; the bias of positions is added after it.

    Where the queries are the image's own, shared by windows as the host does and not projected, they are the gate's
    query input.
    """

    gate: Any

    def forward(self, x: Tensor, q_global: Tensor | None = None) -> Tensor:
        """Attend within windows ``(B nW, N, C)``, by the queries of ``q_global`` ``(B, ..., C)`` if they are given."""
        if self.use_global and q_global is not None:
            windows = len(x) // len(q_global)
            asked = q_global.repeat_interleave(windows, 0) if BY_IMAGE else q_global.repeat(windows, 1, 1, 1)
            asked = asked.reshape(x.shape)
            key, value = self.qkv(x).unflatten(-1, (2, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
            query = self.gate.split_heads(asked).to(key.dtype)  # not projected, which autocast would have narrowed
        else:
            asked = x
            query, key, value = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        bias = self.rel_pos.get_bias().to(query.dtype)
        return self.proj_drop(attend_in_host(self.gate, (query, key, value), (asked, x, x), self.proj, bias))


@holds_gates(PVTAttention, sizes=_sizes)
class GatedPVTAttention(PVTAttention):
    """Drop-in for PVTv2's attention that holds a gate; keys and values stay those of the reduced map."""

    gate: Any

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
        return self.proj_drop(attend_in_host(self.gate, (query, key, value), (x, reduced, reduced), self.proj))
