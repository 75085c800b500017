"""Inputs of the deformable operator."""

from __future__ import annotations

import torch
from torch import Tensor

CASES = {  # name: (levels, B, Q, H, D, P, spread of the locations)
    'two_levels': ([(4, 6), (2, 3)], 2, 5, 2, 4, 3, 0.5),
    'outside': ([(3, 4), (2, 2)], 2, 4, 2, 4, 2, 3.0),
    'one_pixel_levels': ([(1, 1), (1, 1), (2, 1)], 2, 3, 2, 4, 2, 1.0),
    'one_of_everything': ([(3, 2)], 1, 1, 1, 1, 1, 0.5),
    'zero_queries': ([(3, 2), (1, 2)], 2, 0, 2, 4, 2, 0.5),
    'empty_batch': ([(3, 2), (1, 2)], 0, 3, 2, 4, 2, 0.5),
}


def make_inputs(case: str, dtype: torch.dtype = torch.float64, gate: tuple[int, ...] | None = None) -> list[Tensor]:
    levels, batch, queries, heads, dim, points, spread = CASES[case]
    shapes = torch.tensor(levels)
    areas = shapes.prod(1)
    start = areas.cumsum(0) - areas
    locations = 0.5 + spread * (torch.rand(batch, queries, heads, len(levels), points, 2, dtype=dtype) - 0.5) * 2
    value, logits = torch.randn(batch, int(areas.sum()), heads, dim, dtype=dtype), torch.randn_like(locations[..., 0])
    gates = [] if gate is None else [torch.randn(batch, queries, *gate, dtype=dtype)]
    return [value, shapes, start, locations, logits, *gates]
