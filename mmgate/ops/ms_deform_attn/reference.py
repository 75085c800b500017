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


def corners(spatial_shapes: Tensor, locations: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the four pixels around each location: where they lie in their level, and their bilinear shares.

    Args:
        spatial_shapes: ``(L, 2)``, height and width of each level.
        locations: ``(B, Q, H, L, P, 2)`` as (x, y), 0 to 1 over a level.

    Yields:
        Index ``(B, Q, H, L, P)``, int64, and share of that shape; both 0 outside of the level.
    """
    size = spatial_shapes.flip(-1).to(locations.dtype)[:, None]  # (L, 1, 2) as (width, height)
    xy = locations * size - 0.5  # pixel centres become integers
    corner = xy.floor().detach()
    fraction = xy - corner  # (B, Q, H, L, P, 2) in [0, 1)
    for dx, dy in ((0, 0), (1, 0), (0, 1), (1, 1)):
        x, y = corner[..., 0] + dx, corner[..., 1] + dy  # (B, Q, H, L, P)
        inside = (x >= 0) & (x < size[..., 0]) & (y >= 0) & (y < size[..., 1])
        fx = fraction[..., 0] if dx else 1 - fraction[..., 0]
        fy = fraction[..., 1] if dy else 1 - fraction[..., 1]
        yield torch.where(inside, y * size[..., 0] + x, 0).long(), torch.where(inside, fx * fy, 0)
