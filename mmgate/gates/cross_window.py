"""Attention in cross-shaped windows, as in the backbone CSwin."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmgate.errors import ConfigError
from mmgate.gate import Sizes
from mmgate.gates.base.map import MapAttention, MapGate, Size
from mmgate.registry import MODELS

from .parts.options import integer
from .parts.stripes import merge_stripes, split_stripes


def refuse_class_tokens(class_tokens: int) -> None:
    """Raise ConfigError if tokens come before those of the map."""
    if class_tokens:
        raise ConfigError('CrossWindowAttention takes no class token: it would lie in no stripe.')


def lepe_convolutions(channels: int, heads: int, split: int | None) -> nn.ModuleList:
    """Make the depthwise 3 x 3 convolutions of the values (LePE), one for each direction of CSwin's stripes.

    Args:
        channels: Channels C of all heads together.
        heads: Heads H.
        split: Width of a stripe; None for all heads over the whole map, which need one convolution.

    Raises:
        ConfigError: The number of heads is odd, with stripes, or their width no positive integer.
    """
    if split is not None and integer('split', split) and heads % 2:
        raise ConfigError(f'num_heads={heads} must be even, half for each direction of the stripes.')
    branches = 1 if split is None else 2
    width = channels // branches
    return nn.ModuleList(nn.Conv2d(width, width, 3, padding=1, groups=width) for _ in range(branches))


def cross_window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    hw_shape: Size,
    lepe: Iterable[nn.Module],
    *,
    split: int | None,
    head_dim: int,
    scale: float,
    dropout: float = 0.0,
) -> Tensor:
    """Compute CSwin's attention: half of the channels attend in vertical stripes, the other half in horizontal ones.

    Args:
        q: Queries ``(B, N, C)``.
        k: Keys ``(B, N, C)``.
        v: Values ``(B, N, C)``.
        hw_shape: Height and width of the map, ``N = h w``.
        lepe: The convolutions of :func:`lepe_convolutions`, whose output is added (LePE).
        split: Width of a vertical stripe and height of a horizontal one; None for the whole map.
        head_dim: Channels d of a head.
        scale: Factor of the logits.
        dropout: Probability of dropping an attention weight.

    Returns:
        ``(B, N, C)``.

    Source: CSWin transformer (Dong et al., 2022), Eq. 1 to 6.
    """
    height, width = hw_shape
    stripes = [hw_shape] if split is None else [(height, min(split, width)), (min(split, height), width)]
    shares = zip(*(x.chunk(len(stripes), -1) for x in (q, k, v)), strict=True)
    branches = []
    for share, convolution, stripe in zip(shares, lepe, stripes, strict=True):
        queries, keys, values = (split_stripes(x, hw_shape, stripe) for x in share)  # (B n, sh sw, C / branches)
        on_map = values.transpose(1, 2).unflatten(-1, stripe)
        # The convolution sees one stripe, padded with zeros at its borders.
        local = convolution(on_map).flatten(2).transpose(1, 2)
        queries, keys, values = (x.unflatten(-1, (-1, head_dim)).transpose(1, 2) for x in (queries, keys, values))
        # (B n, H / branches, sh sw, d)
        out = F.scaled_dot_product_attention(queries, keys, values, dropout_p=dropout, scale=scale)
        branches.append(merge_stripes(out.transpose(1, 2).flatten(2) + local, hw_shape, stripe))
    return torch.cat(branches, -1)


class CrossWindowGate(MapGate):
    """Gate that replaces attention over a map by CSwin's in stripes, with convolved values (``lepe``) added.

    Args:
        sizes: Sizes of the host's attention.
        split: Width of the vertical stripes, which are as high as the map, and height of the horizontal ones. None lets
            all heads attend over the whole map. The map is padded with zeros to whole stripes.

    Raises:
        ConfigError: The number of heads is odd, with stripes, or there is a class token.

    Source: see :func:`cross_window_attention`.
    """

    def __init__(self, sizes: Sizes, *, split: int | None = 7) -> None:
        super().__init__(sizes)
        refuse_class_tokens(self.class_tokens)
        self.split = split
        self.lepe = lepe_convolutions(self.embed_dims, self.num_heads, split)

    def reset(self) -> None:
        """Initialise the convolutions as torch does."""
        convolutions: Any = self.lepe
        for convolution in convolutions:
            convolution.reset_parameters()

    def mix(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, hw_shape: Size) -> Tensor:
        """Attend in vertical and horizontal stripes, and add the convolved values."""
        return cross_window_attention(
            q,
            k,
            v,
            hw_shape,
            self.lepe,
            split=self.split,
            head_dim=self.head_dim,
            scale=self.scale,
            dropout=self.drop_rate,
        )


@MODELS.register_module()
class CrossWindowAttention(MapAttention):
    """CSwin's attention as a module: half of the heads in vertical stripes, half in horizontal ones, plus convolution.

    Args:
        embed_dims: Channels C, a multiple of ``num_heads``.
        num_heads: Heads H.
        split: Width of the vertical stripes, which are as high as the map, and height of the horizontal ones. None lets
            all heads attend over the whole map. The map is padded with zeros to whole stripes.
        **kwargs: Arguments of :class:`~mmgate.gates.base.map.MapAttention`.

    Raises:
        ConfigError: The number of heads is odd, with stripes, or there are class tokens.

    Attributes:
        gate_type: The gate's class, by which a rule puts this attention into another host.

    Source: see :func:`cross_window_attention`.
    """

    gate_type = CrossWindowGate

    def __init__(self, embed_dims: int, num_heads: int, *, split: int | None = 7, **kwargs: Any) -> None:
        super().__init__(embed_dims, num_heads, **kwargs)
        refuse_class_tokens(self.class_tokens)
        self.split = split
        self.lepe = lepe_convolutions(embed_dims, num_heads, split)

    def mix(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, hw_shape: Size) -> Tensor:
        """Attend in vertical and horizontal stripes, and add the convolved values."""
        return cross_window_attention(
            q,
            k,
            v,
            hw_shape,
            self.lepe,
            split=self.split,
            head_dim=self.head_dim,
            scale=self.scale,
            dropout=self.attn_drop if self.training else 0.0,
        )
