"""Backend of deformable attention by torch's ``grid_sample``, level by level, for any device.

    out[b, q, h] = sum over levels l of  sum over points p of  a_lp  grid_sample(V_l, 2 x_lp - 1)

Layout: the value maps of a level as images (B * H, D, height, width), its locations as grids (B * H, Q, P, 2), where P
may differ from level to level. No operator has to be compiled, but the samples of a level, (B * H, D, Q, P), are in
memory. The CPU has to know the sizes of the levels, and waits for the GPU to read them: once a forward pass of a model,
see ``levels.py``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .levels import numbers_of
from .reference import near
from .samples import Samples, WeightedSamples, weighted


def why_not_grid_sample(value: Tensor) -> str | None:
    """Return the reason why this backend cannot run on ``value``, or None if it can."""
    if value.is_cuda and torch.are_deterministic_algorithms_enabled():
        return 'its backward pass raises on CUDA while torch.use_deterministic_algorithms is on'
    return None


def _numbers(spatial_shapes: Tensor, level_start_index: Tensor) -> tuple[list[list[int]], list[int]]:
    """Return the levels' sizes and starts as Python numbers."""
    if isinstance(spatial_shapes, Tensor) and isinstance(level_start_index, Tensor):
        return numbers_of(spatial_shapes, level_start_index)
    # An export hands on sizes that are numbers and symbols.
    return spatial_shapes.tolist(), level_start_index.tolist()


def attend(samples: Samples) -> Tensor:
    """Compute deformable attention by ``grid_sample``: ``(B, Q, H * D)``."""
    return sum_samples(weighted(samples))


def sum_samples(samples: WeightedSamples) -> Tensor:
    """Sample the values and sum them by weights, like :func:`.reference.sum_samples`, in float32 or more."""
    value, spatial_shapes, level_start_index, locations, weights, num_points = samples
    batch, _, heads, dim = value.shape
    queries = locations.shape[1]
    if not value.numel() or not weights.numel():  # which grid_sample refuses
        nothing = value.sum() + weights.sum() + locations.sum()
        return (nothing * 0).to(value.dtype).expand(batch, queries, heads * dim)
    sizes, starts = _numbers(spatial_shapes, level_start_index)
    if num_points is None:
        num_points = [weights.shape[4]] * len(sizes)
        locations = locations.flatten(3, 4)
        weights = weights.flatten(3)
    compute = torch.promote_types(weights.dtype, torch.float32)
    maps = value.to(compute).permute(0, 2, 3, 1).flatten(0, 1)  # (B * H, D, S)
    # Samples far off the map add nothing, while grid_sample reads the first pixel for NaN.
    locations = near(locations.to(compute))
    grids = (2 * locations - 1).transpose(1, 2).flatten(0, 1)  # (B * H, Q, N, 2), -1 and 1 the outer edges
    shares = weights.to(compute).transpose(1, 2).flatten(0, 1)[:, None]  # (B * H, 1, Q, N)
    grids_of_levels = grids.split(list(num_points), 2)
    shares_of_levels = shares.split(list(num_points), 3)
    output = maps.new_zeros(batch * heads, dim, queries)
    for level, (height, width) in enumerate(sizes):
        if not height * width:
            continue
        image = maps[..., starts[level] : starts[level] + height * width].unflatten(-1, (height, width))
        sampled = F.grid_sample(image, grids_of_levels[level], padding_mode='zeros', align_corners=False)
        output = output + (sampled * shares_of_levels[level]).sum(-1)  # (B * H, D, Q)
    return output.view(batch, heads * dim, queries).transpose(1, 2).to(value.dtype)
