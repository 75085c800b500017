"""Reference of deformable sampling, by plain indexing in torch, with which all backends are compared."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..tracing import is_exporting
from .samples import Samples, WeightedSamples, one_point_levels, weighted
from .uneven import OFF


def attend(samples: Samples) -> Tensor:
    """Compute deformable attention by plain indexing: ``(B, Q, H * D)``."""
    return gather(weighted(samples)) if is_exporting() else sum_samples(weighted(samples))


def sum_samples(samples: WeightedSamples) -> Tensor:
    """Sample values bilinearly at locations on all levels and sum them by weights: ``(B, Q, H * D)``."""
    value, spatial_shapes, level_start_index, locations, weights, _ = one_point_levels(samples)
    batch, _, heads, dim = value.shape
    queries = locations.shape[1]
    b = torch.arange(batch, device=value.device).view(-1, 1, 1, 1, 1)
    h = torch.arange(heads, device=value.device).view(-1, 1, 1)

    # A last level that is empty starts after the last token.
    starts = level_start_index.clamp(max=value.shape[1] - 1)[:, None]
    output = weights.new_zeros(batch, queries, heads, dim)
    for index, bilinear in corners(spatial_shapes, near(locations.to(weights.dtype))):
        rows = value[b, starts + index, h]  # (B, Q, H, L, P, D)
        output = output + ((weights * bilinear)[..., None] * rows).sum((3, 4))
    return output.flatten(2).to(value.dtype)


def gather(samples: WeightedSamples) -> Tensor:
    """Compute :func:`sum_samples` by one index for the rows of all corners and one product of matrices.

    Exported models hold this form, which runtimes run fastest. They hold no GridSample nodes, which TensorRT compiles
    wrongly in deformable attention, without a message (NVIDIA/TensorRT issue 4813).
    """
    value, spatial_shapes, level_start_index, locations, weights, _ = one_point_levels(samples)
    batch, tokens, heads, dim = value.shape
    queries = weights.shape[1]
    levels, points = weights.shape[3:]
    image = torch.arange(batch, device=value.device).view(-1, 1, 1, 1, 1)
    head = torch.arange(heads, device=value.device)[:, None, None]
    starts = level_start_index.clamp(max=tokens - 1)[:, None]
    first = (image * tokens + starts) * heads + head  # (B, 1, H, L, 1)
    rows = []
    shares = []
    for index, bilinear in corners(spatial_shapes, locations.to(weights.dtype)):
        rows.append(first + index * heads)
        shares.append(weights * bilinear)
    shape = (batch, queries, heads, 4 * levels * points)
    row = torch.stack(rows, 3).view(shape)
    share = torch.stack(shares, 3).view(shape)
    gathered = value.reshape(-1, dim)[row].to(share.dtype)  # (B, Q, H, 4 L P, D)
    return (share[..., None, :] @ gathered).view(batch, queries, heads * dim).to(value.dtype)


def near(locations: Tensor) -> Tensor:
    """Move locations that are NaN, infinite or far off the map to a place near it, where they add nothing.

    Their gradients are then 0 instead of NaN.
    """
    return locations.nan_to_num(nan=OFF).clamp(OFF, -OFF)


def corners(spatial_shapes: Tensor, locations: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield, for each of the four pixels around locations ``(..., L, P, 2)``, its index and its bilinear weight.

    Both are ``(..., L, P)`` and 0 outside of the level. The index counts the level's pixels.
    """
    width, height = spatial_shapes.flip(-1).to(locations.dtype)[:, None].unbind(-1)  # (L, 1) each
    # Pixel centres become integers.
    x_pixels = locations[..., 0] * width - 0.5
    y_pixels = locations[..., 1] * height - 0.5
    x0 = x_pixels.floor()
    y0 = y_pixels.floor()
    fx = x_pixels - x0
    fy = y_pixels - y0
    for dx, dy in ((0, 0), (1, 0), (0, 1), (1, 1)):
        x = x0 + dx
        y = y0 + dy
        inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
        share = (fx if dx else 1 - fx) * (fy if dy else 1 - fy)
        yield torch.where(inside, y * width + x, 0).to(torch.int64), torch.where(inside, share, 0)
