"""Reference of deformable sampling, by plain indexing in torch, with which all backends are compared."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .uneven import OFF


def sample(
    value: Tensor, spatial_shapes: Tensor, level_start_index: Tensor, sampling_locations: Tensor, weights: Tensor
) -> Tensor:
    """Sample values bilinearly at locations on all levels and sum them by weights: ``(B, Q, H * D)``.

    Args:
        value: ``(B, S, H, D)``.
        spatial_shapes: ``(L, 2)`` as (height, width), integer.
        level_start_index: ``(L,)``, integer.
        sampling_locations: ``(B, Q, H, L, P, 2)`` as (x, y), 0 to 1 over a level.
        weights: Attention weights ``(B, Q, H, L, P)``.
    """
    batch, _, heads, dim = value.shape
    queries = sampling_locations.shape[1]
    b = torch.arange(batch, device=value.device).view(-1, 1, 1, 1, 1)
    h = torch.arange(heads, device=value.device).view(-1, 1, 1)

    # A last level that is empty starts after the last token.
    starts = level_start_index.clamp(max=value.shape[1] - 1)[:, None]
    output = weights.new_zeros(batch, queries, heads, dim)
    for index, bilinear in corners(spatial_shapes, near(sampling_locations.to(weights.dtype))):
        samples = value[b, starts + index, h]  # (B, Q, H, L, P, D)
        output = output + ((weights * bilinear)[..., None] * samples).sum((3, 4))
    return output.flatten(2).to(value.dtype)


def near(locations: Tensor) -> Tensor:
    """Move locations that are NaN, infinite or far off the map to a place near it, where they add nothing.

    Their gradients are then 0 instead of NaN.
    """
    return locations.nan_to_num(nan=OFF).clamp(OFF, -OFF)


def pixels(spatial_shapes: Tensor, locations: Tensor) -> tuple[Tensor, ...]:
    """Convert locations ``(..., L, P, 2)`` from shares of their level (0 to 1) to pixel coordinates.

    Returns:
        Width and height of the levels, ``(L, 1)``; column and row of the pixel at the upper left of each location, and
        the fractions of a pixel from there to the location, ``(..., L, P)``.
    """
    width, height = spatial_shapes.flip(-1).to(locations.dtype)[:, None].unbind(-1)
    # Pixel centres become integers.
    x = locations[..., 0] * width - 0.5
    y = locations[..., 1] * height - 0.5
    x0 = x.floor()
    y0 = y.floor()
    return width, height, x0, y0, x - x0, y - y0


def corners(
    spatial_shapes: Tensor, locations: Tensor, dtype: torch.dtype = torch.int64
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield, for each of the four pixels around locations ``(..., L, P, 2)``, its index and its bilinear weight.

    Both are ``(..., L, P)`` and 0 outside of the level. The index, of type ``dtype``, counts the level's pixels.
    """
    width, height, x0, y0, fx, fy = pixels(spatial_shapes, locations)
    for dx, dy in ((0, 0), (1, 0), (0, 1), (1, 1)):
        x = x0 + dx
        y = y0 + dy
        inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
        share = (fx if dx else 1 - fx) * (fy if dy else 1 - fy)
        yield torch.where(inside, y * width + x, 0).to(dtype), torch.where(inside, share, 0)
