"""The backbone ViTAE, whose cells have convolutions beside their attention; no mm package has it."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Any

import torch
from mmcv.cnn.bricks.drop import DropPath
from mmcv.cnn.bricks.transformer import FFN, AdaptivePadding
from mmengine.model import BaseModule, trunc_normal_init
from mmpretrain.models.utils import MultiheadAttention
from torch import Tensor, nn

from mmgate import MODELS, ConfigError
from mmgate.ops import kernel_attention

VITAE = {
    'tiny': dict(
        conv_dims=(64, 64, 128), embed_dims=(64, 64, 256), depths=(0, 0, 7), num_heads=4, mlp_ratio=2, groups=64
    ),
    'small': dict(
        conv_dims=(64, 64, 192), embed_dims=(96, 192, 384), depths=(0, 0, 14), num_heads=6, mlp_ratio=3, groups=96
    ),
}
# Of the three reduction cells: the kernel, the factor of the map's sides, the dilations, and True if the cell attends.
CELLS = ((7, 4, (1, 2, 3, 4), True), (3, 2, (1, 2, 3), True), (3, 2, (1, 2), False))


class _Performer(nn.Module):
    """Performer attention of one head: linear attention with positive random features; the value is added to it.

    The features of ``x`` are ``exp(w x - |x|^2 / 2)`` with orthogonal rows ``w`` that are not trained; the product of a
    query's and a key's features is ``exp(q k)`` on average. A constant factor of all features of one query, or of all
    keys together, cancels out: exponents are shifted so that the largest is 0 and nothing overflows.

    Source: Performer (Choromanski et al., 2021), Lemma 1, with half as many features as channels, as T2T-ViT.
    """

    def __init__(self, inputs: int, channels: int, drop: float = 0.1) -> None:
        super().__init__()
        features = channels // 2
        self.kqv = nn.Linear(inputs, 3 * channels)
        self.proj = nn.Linear(channels, channels)
        self.drop = nn.Dropout(drop)
        rows = nn.init.orthogonal_(torch.empty(features, channels)) * features**0.5
        self.register_buffer('rows', rows)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output ``(B, N, channels)`` for tokens ``(B, N, inputs)``."""
        key, query, value = self.kqv(x)[:, None].chunk(3, -1)  # (B, 1, N, d)
        key = key.to(self.rows.dtype)
        query = query.to(self.rows.dtype)
        of_key = key @ self.rows.T - key.square().sum(-1, keepdim=True) / 2
        of_query = query @ self.rows.T
        features = (
            (of_query - of_query.amax(-1, keepdim=True)).exp(),
            (of_key - of_key.amax((-2, -1), keepdim=True)).exp(),
        )
        heads = kernel_attention(*features, value)
        return (value + self.drop(self.proj(heads)))[:, 0]


def _tokens(grid: Tensor) -> Tensor:
    return grid.flatten(2).transpose(1, 2)


def _grid(tokens: Tensor, like: Tensor) -> Tensor:
    return tokens.transpose(1, 2).unflatten(-1, like.shape[2:])


class _ReductionCell(nn.Module):
    """ViTAE's reduction cell: parallel dilated convolutions that make the map smaller and, if it attends, attention.

    Its attention has a branch of three convolutions beside it.
    """

    def __init__(
        self, inputs: int, conv: int, channels: int, kernel: int, factor: int, dilations: Sequence[int], attends: bool
    ) -> None:
        super().__init__()
        self.pad = AdaptivePadding(kernel_size=factor, stride=factor)  # for both branches to make maps of one size
        self.pyramid = nn.ModuleList()
        for dilation in dilations:
            padding = ceil(((kernel - 1) * dilation + 1 - factor) / 2)
            layer = nn.Conv2d(inputs, conv, kernel, factor, padding, dilation)
            self.pyramid.append(nn.Sequential(layer, nn.GELU()))
        self.attends = attends
        if not attends:
            return
        joint = conv * len(dilations)
        strides = (2, 2, 1) if factor == 4 else (2, 1, 1)
        self.branch = nn.Sequential(
            nn.Conv2d(inputs, conv, 3, strides[0], 1),
            nn.SiLU(),
            nn.Conv2d(conv, conv, 3, strides[1], 1),
            nn.BatchNorm2d(conv),
            nn.SiLU(),
            nn.Conv2d(conv, channels, 3, strides[2], 1),
            nn.SiLU(),
        )
        self.norm1 = nn.LayerNorm(joint)
        self.attn = _Performer(joint, channels)
        self.norm2 = nn.LayerNorm(channels)
        self.mlp = nn.Sequential(
            nn.Linear(channels, channels), nn.GELU(), nn.Linear(channels, channels), nn.Dropout(0.1)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the smaller map ``(B, channels, h / factor, w / factor)``, with sides rounded up."""
        x = self.pad(x)
        joint = torch.cat([layer(x) for layer in self.pyramid], 1)
        if not self.attends:
            return joint
        tokens = self.attn(self.norm1(_tokens(joint))) + _tokens(self.branch(x))
        return _grid(tokens + self.mlp(self.norm2(tokens)), joint)


class _NormalCell(nn.Module):
    """ViTAE's normal cell: a transformer layer with three grouped convolutions in a branch beside its attention."""

    def __init__(self, channels: int, heads: int, mlp_ratio: float, groups: int, drop_path: float) -> None:
        super().__init__()
        hidden = round(channels * mlp_ratio)
        self.norm1 = nn.LayerNorm(channels, eps=1e-6)
        self.norm2 = nn.LayerNorm(channels, eps=1e-6)
        drop = dict(type='DropPath', drop_prob=drop_path)
        self.attn = MultiheadAttention(channels, heads, dropout_layer=drop)
        self.ffn = FFN(channels, hidden, act_cfg=dict(type='GELU'), dropout_layer=drop)
        self.branch = nn.Sequential(
            nn.Conv2d(channels, hidden, 3, padding=1, groups=groups),
            nn.BatchNorm2d(hidden),
            nn.SiLU(),
            nn.Conv2d(hidden, channels, 3, padding=1, groups=groups),
            nn.BatchNorm2d(channels),
            nn.SiLU(),
            nn.Conv2d(channels, channels, 3, padding=1, groups=groups),
            nn.SiLU(),
        )
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the cell to a map ``(B, channels, h, w)``; the output has the same shape."""
        tokens = _tokens(x)
        attended = self.attn(self.norm1(tokens))
        tokens = tokens + attended + _tokens(self.drop_path(self.branch(x)))
        return _grid(self.ffn(self.norm2(tokens), identity=tokens), x)


@MODELS.register_module(force=True)
class ViTAE(BaseModule):
    """The backbone ViTAE: three stages, each of a reduction cell and normal cells, for images of any size.

    It has neither a class token nor position embeddings.

    A rule can gate the attention of the normal cells, which is at ``stages.STAGE.CELL.attn`` with CELL from 1 on. The
    reduction cells of the first two stages, CELL 0, have a Performer's attention, which has no logits to gate.

    Args:
        arch: ``'tiny'`` or ``'small'``.
        conv_dims: Channels of the convolutions in each reduction cell, instead of the preset's.
        embed_dims: Channels of each stage, instead of the preset's.
        depths: Normal cells of each stage, instead of the preset's.
        num_heads: Of the normal cells, instead of the preset's.
        mlp_ratio: Width of the normal cells' networks over the channels, instead of the preset's.
        groups: Of the normal cells' convolutions, instead of the preset's.
        drop_path_rate: Of the last normal cell; the others rise to it.
        out_indices: Stages whose maps are returned.
        in_channels: Of the images.
        init_cfg: ``dict(type='Pretrained', checkpoint=...)`` or None.

    Raises:
        ConfigError: An unknown ``arch``, or numbers that do not fit three stages.

    Source: ViTAE (Xu et al., 2021), sections 3.2 to 3.5 and Table 1; activations, norms and dropout as in the authors'
    public code.
    """

    def __init__(
        self,
        arch: str = 'tiny',
        *,
        conv_dims: Sequence[int] | None = None,
        embed_dims: Sequence[int] | None = None,
        depths: Sequence[int] | None = None,
        num_heads: int | None = None,
        mlp_ratio: float | None = None,
        groups: int | None = None,
        drop_path_rate: float = 0.0,
        out_indices: Sequence[int] = (2,),
        in_channels: int = 3,
        init_cfg: dict | None = None,
    ) -> None:
        super().__init__(init_cfg)
        if arch not in VITAE:
            raise ConfigError(f'arch={arch!r} is unknown; choose one of {", ".join(VITAE)} and override its fields.')
        given = dict(
            conv_dims=conv_dims,
            embed_dims=embed_dims,
            depths=depths,
            num_heads=num_heads,
            mlp_ratio=mlp_ratio,
            groups=groups,
        )
        sizes: dict[str, Any] = {**VITAE[arch], **{name: one for name, one in given.items() if one is not None}}
        by_stage = {name: sizes[name] for name in ('conv_dims', 'embed_dims', 'depths')}
        for name, values in by_stage.items():
            if len(values) != len(CELLS):
                raise ConfigError(f'{name}={values!r} needs one value for each of the {len(CELLS)} stages.')
        if not set(out_indices) <= set(range(len(CELLS))):
            raise ConfigError(f'out_indices={tuple(out_indices)} must lie in 0 to {len(CELLS) - 1}.')
        joint = sizes['conv_dims'][2] * len(CELLS[2][2])
        if joint != sizes['embed_dims'][2]:
            raise ConfigError(
                f'embed_dims={tuple(sizes["embed_dims"])} must end with {joint}, {len(CELLS[2][2])} times the last of '
                f'conv_dims={tuple(sizes["conv_dims"])}: the third reduction cell has nothing but its convolutions.'
            )
        self.out_indices = tuple(sorted(out_indices))
        self.stages = nn.ModuleList()
        cells = 0
        total = max(sum(sizes['depths']) - 1, 1)
        for cell, conv, channels, depth in zip(CELLS, *by_stage.values(), strict=True):
            stage = nn.Sequential(_ReductionCell(in_channels, conv, channels, *cell))
            for _ in range(depth):
                options = sizes['num_heads'], sizes['mlp_ratio'], sizes['groups']
                stage.append(_NormalCell(channels, *options, drop_path_rate * cells / total))
                cells += 1
            self.stages.append(stage)
            in_channels = channels

    def init_weights(self) -> None:
        """Initialise from scratch, or from the checkpoint of a ``Pretrained`` init_cfg."""
        super().init_weights()
        if self.init_cfg is None:
            for module in self.modules():
                if isinstance(module, nn.Linear):
                    trunc_normal_init(module, std=0.02)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the maps ``(B, C_i, H_i, W_i)`` of the stages in ``out_indices`` for images ``(B, 3, H, W)``."""
        maps = []
        for i, stage in enumerate(self.stages):
            x = stage(x)
            if i in self.out_indices:
                maps.append(x.contiguous())  # mmcv's compiled operators would read tokens as NCHW
        return tuple(maps)
