"""Attention in cross-shaped windows (CSwin)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmgate.layers.base.map import MapAttention
from mmgate.registry import MODELS

from .parts.stripes import merge_stripes, split_stripes


@MODELS.register_module()
class CrossWindowAttention(MapAttention):
    """Half of the heads attend in vertical stripes, half in horizontal ones, with convolved values added (LePE).

    Args:
        split: Width of a vertical stripe, which is as high as the map, and height of a horizontal one; None for all
            heads over the whole map. A map is padded with zeros to whole stripes.
        **kwargs: Those of :class:`~mmgate.layers.base.map.MapAttention`.

    Raises:
        ValueError: An odd number of heads in stripes.

    Source: CSWin transformer (Dong et al., 2022), Eq. 1 to 6.
    """

    def __init__(self, embed_dims: int, num_heads: int, *, split: int | None = 7, **kwargs: Any) -> None:
        super().__init__(embed_dims, num_heads, **kwargs)
        if split is not None and num_heads % 2:
            raise ValueError(f'num_heads={num_heads} must be even, half for each direction of the stripes.')
        self.split = split
        self.branches = 1 if split is None else 2
        channels = embed_dims // self.branches
        self.lepe = nn.ModuleList(
            nn.Conv2d(channels, channels, 3, padding=1, groups=channels) for _ in range(self.branches)
        )

    def mix(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, hw_shape: tuple[int, int]) -> Tensor:
        """Attend in every branch, on its share of the channels."""
        stripes = [hw_shape] if self.split is None else [(hw_shape[0], self.split), (self.split, hw_shape[1])]
        shares = (t.chunk(self.branches, -1) for t in (q, k, v))
        branches: Any = zip(*shares, self.lepe, stripes, strict=True)
        return torch.cat([self._branch(a, b, c, lepe, stripe, hw_shape) for a, b, c, lepe, stripe in branches], -1)

    def _branch(
        self, q: Tensor, k: Tensor, v: Tensor, lepe: nn.Module, stripe: tuple[int, int], hw_shape: tuple[int, int]
    ) -> Tensor:
        stripe = (min(stripe[0], hw_shape[0]), min(stripe[1], hw_shape[1]))
        q, k, v = (split_stripes(t, hw_shape, stripe) for t in (q, k, v))
        local = lepe(v.transpose(1, 2).unflatten(-1, stripe)).flatten(2).transpose(1, 2)  # within the stripe
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for t in (q, k, v))  # (B n, H / branches, N, d)
        out = F.scaled_dot_product_attention(
            q, k, v, dropout_p=self.attn_drop if self.training else 0.0, scale=self.scale
        )
        return merge_stripes(out.transpose(1, 2).flatten(2) + local, hw_shape, stripe)
