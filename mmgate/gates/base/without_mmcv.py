"""Attention modules in plain torch with the arguments and parameters of mmcv's, for use without mmcv."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mmgate.errors import ConfigError


class DeformableProjections(nn.Module):
    """The linear layers of mmcv's ``MultiScaleDeformableAttention``, under the same names, without its ``forward``.

    The arguments are mmcv's. ``init_cfg``, which mmengine reads, has to be None.

    Raises:
        ConfigError: ``embed_dims`` is no multiple of ``num_heads``, or ``init_cfg`` is given.

    Source: Deformable DETR (arXiv 2010.04159), section 4.1 and appendix A.4.
    """

    def __init__(
        self,
        embed_dims: int = 256,
        num_heads: int = 8,
        num_levels: int = 4,
        num_points: int = 4,
        im2col_step: int = 64,
        dropout: float = 0.1,
        batch_first: bool = False,
        norm_cfg: dict | None = None,
        init_cfg: dict | None = None,
        value_proj_ratio: float = 1.0,
    ) -> None:
        super().__init__()
        _refuse_init_cfg(init_cfg)
        if embed_dims % num_heads:
            raise ConfigError(f'embed_dims={embed_dims} is not a multiple of num_heads={num_heads}.')
        self.embed_dims = embed_dims
        self.num_heads = num_heads
        self.num_levels = num_levels
        self.num_points = num_points
        self.im2col_step = im2col_step
        self.batch_first = batch_first
        self.norm_cfg = norm_cfg
        self.init_cfg = init_cfg
        self.dropout = nn.Dropout(dropout)
        samples = num_heads * num_levels * num_points
        values = int(embed_dims * value_proj_ratio)
        self.sampling_offsets = nn.Linear(embed_dims, 2 * samples)
        self.attention_weights = nn.Linear(embed_dims, samples)
        self.value_proj = nn.Linear(embed_dims, values)
        self.output_proj = nn.Linear(values, embed_dims)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Initialise as Deformable DETR: each head samples in another direction, its points one pixel apart.

        All weights are even.
        """
        angles = torch.arange(self.num_heads, device=self.sampling_offsets.bias.device) * (2 * math.pi / self.num_heads)
        directions = torch.stack([angles.cos(), angles.sin()], -1)
        directions = directions / directions.abs().amax(-1, keepdim=True)  # (H, 2), on the edge of a square
        steps = torch.arange(1, self.num_points + 1, device=directions.device)
        offsets = directions[:, None, None] * steps[:, None]  # (H, 1, P, 2)
        self.sampling_offsets.bias.copy_(offsets.expand(-1, self.num_levels, -1, -1).flatten())
        for zero in (self.sampling_offsets.weight, *self.attention_weights.parameters()):
            zero.zero_()
        for projection in (self.value_proj, self.output_proj):
            nn.init.xavier_uniform_(projection.weight)
            projection.bias.zero_()


class MultiheadAttention(nn.Module):
    """Replacement for mmcv's ``MultiheadAttention``: torch's module, plus position embeddings and identity.

    The arguments are mmcv's. ``init_cfg``, which mmengine reads, has to be None.

    Raises:
        ConfigError: ``init_cfg`` is given.
    """

    def __init__(
        self,
        embed_dims: int,
        num_heads: int,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        dropout_layer: dict | None = None,
        init_cfg: dict | None = None,
        batch_first: bool = False,
        dropout: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        _refuse_init_cfg(init_cfg)
        if dropout is not None:
            attn_drop = dropout
            dropout_layer = dict(type='Dropout', drop_prob=dropout)
        self.embed_dims = embed_dims
        self.num_heads = num_heads
        self.batch_first = batch_first
        self.init_cfg = init_cfg
        self.attn = nn.MultiheadAttention(embed_dims, num_heads, attn_drop, **kwargs)
        self.proj_drop = nn.Dropout(proj_drop)
        self.dropout_layer = build_dropout(dropout_layer) if dropout_layer else nn.Identity()

    def init_weights(self) -> None:
        """Do nothing: parameters keep torch's initial values, as in mmcv's module without an ``init_cfg``."""

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        identity: Tensor | None = None,
        query_pos: Tensor | None = None,
        key_pos: Tensor | None = None,
        attn_mask: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        **kwargs: object,
    ) -> Tensor:
        """Attend and add ``identity``, called as mmcv's ``MultiheadAttention``.

        Tensors are ``(N, B, C)``, or ``(B, N, C)`` if ``batch_first``. Without ``key_pos``, ``query_pos`` is added to a
        ``key`` of its shape, too. Further arguments are not used, as in mmcv, whose layers give every attention all of
        theirs.
        """
        key = query if key is None else key
        value = key if value is None else value
        identity = query if identity is None else identity
        if key_pos is None and query_pos is not None and query_pos.shape == key.shape:
            key_pos = query_pos
        query = query if query_pos is None else query + query_pos
        key = key if key_pos is None else key + key_pos
        if self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        out = self.attn(query, key, value, attn_mask=attn_mask, key_padding_mask=key_padding_mask)[0]
        out = out.transpose(0, 1) if self.batch_first else out
        return identity + self.dropout_layer(self.proj_drop(out))


class DropPath(nn.Module):
    """Stochastic depth: drop samples with the probability ``drop_prob`` and divide the others by ``1 - drop_prob``."""

    def __init__(self, drop_prob: float = 0.1) -> None:
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x: Tensor) -> Tensor:
        """Drop samples of ``x`` along the first axis in training mode; return ``x`` unchanged in eval mode."""
        if not self.training or self.drop_prob == 0:
            return x
        kept = torch.rand(x.shape[:1], dtype=x.dtype, device=x.device) >= self.drop_prob
        return x * (kept / (1 - self.drop_prob)).to(x.dtype).view(-1, *[1] * (x.dim() - 1))


def build_dropout(cfg: dict[str, Any]) -> nn.Module:
    """Build a dropout or drop-path module from mmcv's config ``dict(type='Dropout' or 'DropPath', drop_prob=...)``.

    Raises:
        ConfigError: The type is another one.
    """
    layers: dict[str, Callable[..., nn.Module]] = dict(
        Dropout=lambda drop_prob=0.5: nn.Dropout(drop_prob), DropPath=DropPath
    )
    options = dict(cfg)
    name = options.pop('type')
    if name not in layers:
        raise ConfigError(f'dropout_layer: type={name!r} needs mmcv; without it there are {", ".join(layers)}.')
    return layers[name](**options)


def _refuse_init_cfg(init_cfg: dict | None) -> None:
    if init_cfg is not None:
        raise ConfigError('init_cfg is read by mmengine, which is not installed; leave it away.')
