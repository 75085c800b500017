"""Attention in cross-shaped windows (CSwin)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmgate.layers.base.map import MapAttention, Size
from mmgate.registry import MODELS

from .parts.stripes import merge_stripes, split_stripes


@MODELS.register_module()
class CrossWindowAttention(MapAttention):
    """Attention in vertical stripes by one half of the heads, in horizontal ones by the other, with convolved values.

    The convolved values are added to the heads (LePE).

    Args:
        embed_dims: Channels C.
        num_heads: Heads H.
        split: Width of the vertical stripes, which are as high as the map, and height of the horizontal ones. None lets
            all heads attend over the whole map. The map is padded with zeros to whole stripes.
        qkv_bias: True for a bias in the projections of query, key and value.
        qk_scale: Factor of the logits; ``1 / sqrt(d)`` by default.
        attn_drop: Probability of dropping an attention weight.
        proj_drop: Probability of dropout after the output projection.
        dropout_layer: Config of the dropout or drop path before the identity is added.

    Raises:
        ValueError: The number of heads is odd, with stripes.

    Source: CSWin transformer (Dong et al., 2022), Eq. 1 to 6.
    """

    def __init__(
        self,
        embed_dims: int,
        num_heads: int,
        *,
        split: int | None = 7,
        qkv_bias: bool = True,
        qk_scale: float | None = None,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        dropout_layer: dict | None = None,
    ) -> None:
        super().__init__(
            embed_dims,
            num_heads,
            qkv_bias=qkv_bias,
            qk_scale=qk_scale,
            attn_drop=attn_drop,
            proj_drop=proj_drop,
            dropout_layer=dropout_layer,
        )
        if split is not None and num_heads % 2:
            raise ValueError(f'num_heads={num_heads} must be even, half for each direction of the stripes.')
        self.split = split
        self.branches = 1 if split is None else 2
        channels = embed_dims // self.branches
        self.lepe = nn.ModuleList(
            nn.Conv2d(channels, channels, 3, padding=1, groups=channels) for _ in range(self.branches)
        )

    def mix(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, hw_shape: Size) -> Tensor:
        """Attend in both directions, each on its half of the channels."""
        stripes = [hw_shape]
        if self.split is not None:
            stripes = [(hw_shape[0], self.split), (self.split, hw_shape[1])]
        queries, keys, values = (t.chunk(self.branches, -1) for t in (q, k, v))
        outputs = []
        for number, stripe in enumerate(stripes):
            part = (queries[number], keys[number], values[number])
            outputs.append(self._attend_in_stripes(*part, self.lepe[number], stripe, hw_shape))
        return torch.cat(outputs, -1)

    def _attend_in_stripes(
        self, q: Tensor, k: Tensor, v: Tensor, lepe: nn.Module, stripe: Size, hw_shape: Size
    ) -> Tensor:
        stripe = (min(stripe[0], hw_shape[0]), min(stripe[1], hw_shape[1]))
        q, k, v = (split_stripes(t, hw_shape, stripe) for t in (q, k, v))
        # The values are convolved within the stripe.
        local = lepe(v.transpose(1, 2).unflatten(-1, stripe)).flatten(2).transpose(1, 2)
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for t in (q, k, v))  # (B n, H / branches, N, d)
        out = F.scaled_dot_product_attention(
            q, k, v, dropout_p=self.attn_drop if self.training else 0.0, scale=self.scale
        )
        return merge_stripes(out.transpose(1, 2).flatten(2) + local, hw_shape, stripe)
