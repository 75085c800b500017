"""Attentions of repositories on the web that are cloned and not installed, with their signatures and plain sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SHAPES, STARTS = torch.tensor([[4, 6], [2, 3]]), torch.tensor([0, 24])


class Attention(nn.Module):
    """As mmdet's projects/ViTDet has it: a map with a table of distances a side."""

    __module__ = 'projects.ViTDet.vitdet.vit'

    def __init__(self, dim: int, num_heads: int, use_rel_pos: bool, input_size: tuple[int, int]) -> None:
        super().__init__()
        self.num_heads, self.scale, self.use_rel_pos = num_heads, (dim // num_heads) ** -0.5, use_rel_pos
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        if use_rel_pos:
            self.rel_pos_h, self.rel_pos_w = (
                nn.Parameter(torch.randn(2 * size - 1, dim // num_heads)) for size in input_size
            )

    def forward(self, x: Tensor) -> Tensor:
        batch, height, width, channels = x.shape
        q, k, v = self.qkv(x).view(batch, height * width, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        logits = self.scale * q @ k.mT
        if self.use_rel_pos:
            for i in range(height * width):
                for j in range(height * width):
                    down, right = i // width - j // width, i % width - j % width
                    entry = self.rel_pos_h[down + height - 1] + self.rel_pos_w[right + width - 1]
                    logits[:, :, i, j] += q[:, :, i] @ entry
        out = logits.softmax(-1) @ v
        return self.proj(out.transpose(1, 2).reshape(batch, height, width, channels))


def deformable_inputs(columns: int = 4) -> list[Tensor]:
    """Return queries, reference points, memory, shapes, starts and a mask of padding."""
    mask = torch.arange(30)[None] >= torch.tensor([[30], [25]])
    return [torch.randn(2, 5, 32), torch.rand(2, 5, 2, columns), torch.randn(2, 30, 32), SHAPES, STARTS, mask]


def summed(value: Tensor, shapes: Any, locations: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """Return ``(B, Q, H d)``: values ``(B, S, H, d)`` at each level's ``(B, Q, H, P, 2)`` times ``(B, Q, H, P)``."""
    batch, _, heads, width = value.shape
    total: Any = 0
    start = 0
    for level, (rows, columns) in enumerate(torch.as_tensor(shapes).tolist()):
        of_level = value[:, start : start + rows * columns].permute(0, 2, 3, 1).reshape(-1, width, rows, columns)
        start += rows * columns
        grid = 2 * locations[level].transpose(1, 2).flatten(0, 1) - 1  # (B H, Q, P, 2)
        samples = F.grid_sample(of_level, grid, align_corners=False)  # (B H, d, Q, P)
        of_weights = weights[level].transpose(1, 2).flatten(0, 1)[:, None]
        total = total + (samples * of_weights).sum(-1)
    return total.view(batch, heads * width, -1).transpose(1, 2)


class Deformable(nn.Module):
    """Base: the projections, and a call by names that a subclass gives."""

    def __init__(
        self,
        channels: int,
        heads: int,
        levels: int,
        points: int | list[int],
        *,
        values: bool = True,
        ratio: float = 1.0,
    ) -> None:
        super().__init__()
        counts = points if isinstance(points, list) else [points] * levels
        self.heads, self.counts = heads, counts
        self.sampling_offsets = nn.Linear(channels, 2 * heads * sum(counts))
        self.attention_weights = nn.Linear(channels, heads * sum(counts))
        if values:
            self.value_proj = nn.Linear(channels, int(channels * ratio))
            self.output_proj = nn.Linear(int(channels * ratio), channels)

    def attended(self, query: Tensor, value: Tensor, points: Tensor, shapes: Any, scale: float = 0.5) -> Tensor:
        offsets = self.sampling_offsets(query).unflatten(-1, (self.heads, -1, 2)).split(self.counts, 3)
        weights = self.attention_weights(query).unflatten(-1, (self.heads, -1)).softmax(-1).split(self.counts, 3)
        locations = []
        for level, (of_level, count) in enumerate(zip(offsets, self.counts, strict=True)):
            around = points[:, :, None, min(level, points.shape[2] - 1), None]  # (B, Q, 1, 1, 2|4)
            if points.shape[-1] == 2:
                locations.append(around + of_level / torch.as_tensor(shapes)[level].flip(-1))
            else:
                locations.append(around[..., :2] + of_level / count * around[..., 2:] * scale)
        return summed(value, shapes, locations, weights)

    def values(self, value: Tensor, padding: Tensor | None) -> Tensor:
        value = self.value_proj(value)
        if padding is not None:
            value = value.masked_fill(padding[..., None], 0.0)
        return value.unflatten(-1, (self.heads, -1))


class MSDeformAttn(Deformable):
    """As Deformable DETR and IDEA-Research's DINO have it, and with another ``ratio`` ViT-Adapter."""

    def __init__(
        self,
        d_model: int = 32,
        n_levels: int = 2,
        n_heads: int = 4,
        n_points: int = 3,
        use_4D_normalizer: bool = False,
        ratio: float = 1.0,
    ) -> None:
        super().__init__(d_model, n_heads, n_levels, n_points, ratio=ratio)
        self.d_model, self.n_levels, self.n_heads, self.n_points = d_model, n_levels, n_heads, n_points
        self.use_4D_normalizer = use_4D_normalizer

    def forward(
        self,
        query: Tensor,
        reference_points: Tensor,
        input_flatten: Tensor,
        input_spatial_shapes: Tensor,
        input_level_start_index: Tensor,
        input_padding_mask: Tensor | None = None,
    ) -> Tensor:
        value = self.values(input_flatten, input_padding_mask)
        return self.output_proj(self.attended(query, value, reference_points, input_spatial_shapes))


class OfGroundingDINO(Deformable):
    """As Grounding DINO's repository has it: no identity, and no dropout."""

    def __init__(
        self,
        embed_dim: int = 32,
        num_heads: int = 4,
        num_levels: int = 2,
        num_points: int = 3,
        img2col_step: int = 64,
        batch_first: bool = False,
    ) -> None:
        super().__init__(embed_dim, num_heads, num_levels, num_points)
        self.embed_dim, self.num_heads, self.num_levels, self.num_points = embed_dim, num_heads, num_levels, num_points
        self.batch_first = batch_first

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        query_pos: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        reference_points: Any = None,
        spatial_shapes: Any = None,
        level_start_index: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        value = query if value is None else value
        query = query if query_pos is None else query + query_pos
        if not self.batch_first:
            query, value = query.transpose(0, 1), value.transpose(0, 1)
        out = self.output_proj(
            self.attended(query, self.values(value, key_padding_mask), reference_points, spatial_shapes)
        )
        return out if self.batch_first else out.transpose(0, 1)


class OfDetrex(OfGroundingDINO):
    """As detrex has it."""

    def __init__(
        self,
        embed_dim: int = 32,
        num_heads: int = 4,
        num_levels: int = 2,
        num_points: int = 3,
        img2col_step: int = 64,
        dropout: float = 0.0,
        batch_first: bool = False,
    ) -> None:
        super().__init__(embed_dim, num_heads, num_levels, num_points, batch_first=batch_first)
        self.dropout = nn.Dropout(dropout)

    def forward(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        identity: Tensor | None = None,
        query_pos: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        reference_points: Any = None,
        spatial_shapes: Any = None,
        level_start_index: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        levels = (reference_points, spatial_shapes, level_start_index)
        out = super().forward(query, key, value, query_pos, key_padding_mask, *levels)
        return self.dropout(out) + (query if identity is None else identity)


class OfRTDETR(Deformable):
    """As RT-DETR's first version has it."""

    def __init__(self, embed_dim: int = 32, num_heads: int = 4, num_levels: int = 2, num_points: int = 3) -> None:
        super().__init__(embed_dim, num_heads, num_levels, num_points)
        self.embed_dim, self.num_heads, self.num_levels, self.num_points = embed_dim, num_heads, num_levels, num_points

    def forward(
        self,
        query: Tensor,
        reference_points: Tensor,
        value: Tensor,
        value_spatial_shapes: list[list[int]],
        value_mask: Tensor | None = None,
    ) -> Tensor:
        padding = None if value_mask is None else ~value_mask
        value = self.values(value, padding)
        return self.output_proj(self.attended(query, value, reference_points, value_spatial_shapes))


class OfRTDETRv2(Deformable):
    """As RT-DETR's second version has it, and with ``values=False`` D-FINE and DEIM."""

    projects = True

    def __init__(
        self,
        embed_dim: int = 32,
        num_heads: int = 4,
        num_levels: int = 2,
        num_points: int | list[int] = 3,
        method: str = 'default',
        offset_scale: float = 0.5,
    ) -> None:
        super().__init__(embed_dim, num_heads, num_levels, num_points, values=self.projects)
        points = self.counts
        self.embed_dim, self.num_heads, self.num_levels, self.num_points_list = embed_dim, num_heads, num_levels, points
        self.method, self.offset_scale = method, offset_scale
        self.register_buffer('num_points_scale', torch.tensor([1 / n for n in points for _ in range(n)]))

    def forward(
        self,
        query: Tensor,
        reference_points: Tensor,
        value: Any,
        value_spatial_shapes: list[list[int]],
        value_mask: Tensor | None = None,
    ) -> Tensor:
        padding = None if value_mask is None else ~value_mask
        value = self.values(value, padding)
        scale = self.offset_scale
        return self.output_proj(self.attended(query, value, reference_points, value_spatial_shapes, scale))


class OfDFINE(OfRTDETRv2):
    """As D-FINE and DEIM have it: the decoder projects the values and hands in a level each."""

    projects = False

    def forward(  # type: ignore[override]
        self, query: Tensor, reference_points: Tensor, value: Sequence[Tensor], value_spatial_shapes: list[list[int]]
    ) -> Tensor:
        joined = torch.cat([*value], -1).permute(0, 3, 1, 2)
        return self.attended(query, joined, reference_points, value_spatial_shapes, self.offset_scale)


class OfUltralytics(Deformable):
    """As ultralytics' RT-DETR has it."""

    def __init__(self, d_model: int = 32, n_levels: int = 2, n_heads: int = 4, n_points: int = 3) -> None:
        super().__init__(d_model, n_heads, n_levels, n_points)
        self.d_model, self.n_levels, self.n_heads, self.n_points = d_model, n_levels, n_heads, n_points

    def forward(
        self,
        query: Tensor,
        refer_bbox: Tensor,
        value: Tensor,
        value_shapes: list[list[int]],
        value_mask: Tensor | None = None,
    ) -> Tensor:
        return self.output_proj(self.attended(query, self.values(value, value_mask), refer_bbox, value_shapes))


# by the name of a repository's class, where it is in a clone, and ours
PLACES: dict[str, tuple[str, str, type[Deformable]]] = {
    'dino': ('models.dino.ops.modules.ms_deform_attn', 'MSDeformAttn', MSDeformAttn),
    'grounding_dino': (
        'groundingdino.models.GroundingDINO.ms_deform_attn',
        'MultiScaleDeformableAttention',
        OfGroundingDINO,
    ),
    'detrex': ('detrex.layers.multi_scale_deform_attn', 'MultiScaleDeformableAttention', OfDetrex),
    'rt_detr': ('src.zoo.rtdetr.rtdetr_decoder', 'MSDeformableAttention', OfRTDETR),
    'rt_detr_v2': ('src.zoo.rtdetr.rtdetrv2_decoder', 'MSDeformableAttention', OfRTDETRv2),
    'd_fine': ('src.zoo.dfine.dfine_decoder', 'MSDeformableAttention', OfDFINE),
    'ultralytics': ('ultralytics.nn.modules.transformer', 'MSDeformAttn', OfUltralytics),
}


def in_clone(name: str) -> type[Any]:
    """Return the class of a repository, where a clone has it."""
    module, called, ours = PLACES[name]
    return type(called, (ours,), dict(__module__=module, __qualname__=called))


class Layer(nn.Module):
    """A layer that calls a repository's class as its decoder does.

    Args:
        name: Of :data:`PLACES`.
        **options: Of the class.
    """

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__()
        self.name = name
        self.attn = in_clone(name)(**options)

    def forward(self, query: Tensor, points: Tensor, memory: Tensor, shapes: Tensor, padding: Tensor) -> Tensor:
        """Attend from ``(B, Q, C)`` to ``(B, S, C)``; ``padding (B, S)`` is True where it is."""
        starts = shapes.prod(-1).cumsum(0) - shapes.prod(-1)
        sizes = shapes.tolist()
        if self.name == 'dino':
            return self.attn(query, points, memory, shapes, starts, padding)
        if self.name in ('grounding_dino', 'detrex'):
            levels = dict(reference_points=points, spatial_shapes=shapes, level_start_index=starts)
            query, memory = query.transpose(0, 1), memory.transpose(0, 1)
            given = dict(value=memory, query_pos=query / 2, key_padding_mask=padding, key=None)
            return self.attn(query=query, **given, **levels, further=None).transpose(0, 1)
        if self.name == 'd_fine':
            memory = memory.masked_fill(padding[..., None], 0.0).unflatten(-1, (4, -1)).permute(0, 2, 3, 1)
            return self.attn(query, points, memory.split(shapes.prod(-1).tolist(), -1), sizes)
        if self.name == 'ultralytics':
            return self.attn(query, points, memory, sizes, padding)
        return self.attn(query, points, memory, sizes, ~padding)
