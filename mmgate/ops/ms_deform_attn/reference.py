"""Reference of the weighted sampling: plain indexing, exact in float64, differentiable by autograd."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def sample(
    value: Tensor, spatial_shapes: Tensor, level_start_index: Tensor, sampling_locations: Tensor, weights: Tensor
) -> Tensor:
    """Reference of the weighted sampling: plain indexing, differentiable by autograd, no loop over levels.

    Args and return value as in :func:`mmgate.ops.ms_deform_attn`, with attention ``weights`` for logits and gate.
    """
    batch, _, heads, dim = value.shape
    queries = sampling_locations.shape[1]
    b = torch.arange(batch, device=value.device).view(-1, 1, 1, 1, 1)
    h = torch.arange(heads, device=value.device).view(-1, 1, 1)

    starts = level_start_index.clamp(max=value.shape[1] - 1)[:, None]  # where a last level is empty
    output = weights.new_zeros(batch, queries, heads, dim)
    for index, bilinear in corners(spatial_shapes, sampling_locations.to(weights.dtype)):
        samples = value[b, starts + index, h]  # (B, Q, H, L, P, D)
        output = output + ((weights * bilinear)[..., None] * samples).sum((3, 4))
    return output.flatten(2).to(value.dtype)


def pixels(spatial_shapes: Tensor, locations: Tensor) -> tuple[Tensor, ...]:
    """Return width and height of the levels, ``(L, 1)``, and each location's pixel at its upper left and fractions."""
    width, height = spatial_shapes.flip(-1).to(locations.dtype)[:, None].unbind(-1)
    x, y = locations[..., 0] * width - 0.5, locations[..., 1] * height - 0.5  # pixel centres become integers
    x0, y0 = x.floor(), y.floor()
    return width, height, x0, y0, x - x0, y - y0


def corners(
    spatial_shapes: Tensor, locations: Tensor, dtype: torch.dtype = torch.int64
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the four pixels around each location ``(..., L, P, 2)``, index in the level and bilinear share.

    Both are ``(..., L, P)``, and 0 outside of the level; ``dtype`` is the index's.
    """
    width, height, x0, y0, fx, fy = pixels(spatial_shapes, locations)
    for dx, dy in ((0, 0), (1, 0), (0, 1), (1, 1)):
        x, y = x0 + dx, y0 + dy
        inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
        share = (fx if dx else 1 - fx) * (fy if dy else 1 - fy)
        yield torch.where(inside, y * width + x, 0).to(dtype), torch.where(inside, share, 0)
