"""Classes as projects have them that are cloned and not installed."""

from __future__ import annotations

import torch
from mmcv.ops import MultiScaleDeformableAttention
from torch import Tensor, nn

SHAPES, STARTS = torch.tensor([[4, 6], [2, 3]]), torch.tensor([0, 24])


class Attention(nn.Module):
    """As mmdet's projects/ViTDet has it: a map with a table of distances a side."""

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


class MSDeformAttn(MultiScaleDeformableAttention):
    """As Deformable DETR, Mask DINO and ViT-Adapter have it: mmcv's by other arguments, and no identity."""

    def __init__(self, d_model: int, n_levels: int, n_heads: int, n_points: int, ratio: float = 1.0) -> None:
        sizes = (d_model, n_heads, n_levels, n_points)
        super().__init__(*sizes, dropout=0.0, batch_first=True, value_proj_ratio=ratio)
        self.d_model, self.n_levels, self.n_heads, self.n_points = d_model, n_levels, n_heads, n_points

    def forward(
        self,
        query: Tensor,
        reference_points: Tensor,
        input_flatten: Tensor,
        input_spatial_shapes: Tensor,
        input_level_start_index: Tensor,
        input_padding_mask: Tensor | None = None,
    ) -> Tensor:
        levels = dict(spatial_shapes=input_spatial_shapes, level_start_index=input_level_start_index)
        given = dict(value=input_flatten, key_padding_mask=input_padding_mask, reference_points=reference_points)
        return super().forward(query, identity=torch.zeros_like(query), **given, **levels)


class DecoderLayer(nn.Module):
    """As in Mask DINO: torch's self-attention, and a deformable cross-attention whose arguments have no names."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn = nn.MultiheadAttention(32, 4)
        self.cross_attn = MSDeformAttn(32, 2, 4, 3)

    def forward(self, target: Tensor, points: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        target = target + self.self_attn(target, target, target)[0]
        crossed = self.cross_attn(target.transpose(0, 1), points, memory.transpose(0, 1), SHAPES, STARTS, mask)
        return target + crossed.transpose(0, 1)


def deformable_inputs(columns: int = 4) -> list[Tensor]:
    mask = torch.arange(30)[None] >= torch.tensor([[30], [25]])
    return [torch.randn(2, 5, 32), torch.rand(2, 5, 2, columns), torch.randn(2, 30, 32), SHAPES, STARTS, mask]
