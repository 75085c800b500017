"""What measuring needs of multi-scale deformable attention: the class of a call, and a small call of its variant."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..dispatch import Problems

QUERIES = 5


def _shape_class(
    value: Tensor,
    spatial_shapes: Tensor,
    level_start_index: Tensor,
    points: Tensor,
    logits: Tensor,
    gate: Tensor | None,
    residual: bool,
    position: str,
    reference_points: Tensor | None,
) -> tuple[Any, ...]:
    """Sizes that vary with the image by their power of two, all others as they are."""
    batch, tokens, heads, dim = value.shape
    queries, (levels, count) = logits.shape[1], logits.shape[3:]
    columns = 0 if reference_points is None else reference_points.shape[-1]
    of_gate = 'ungated' if gate is None else f'gate{"".join("1" if n == 1 else "n" for n in gate.shape[-3:])}'
    sizes = f'b{batch.bit_length()} s{tokens.bit_length()} q{queries.bit_length()} h{heads} d{dim} l{levels} p{count}'
    return sizes, of_gate, residual, position, columns, points.dtype, logits.dtype


def _small(
    value: Tensor,
    spatial_shapes: Tensor,
    level_start_index: Tensor,
    points: Tensor,
    logits: Tensor,
    gate: Tensor | None,
    residual: bool,
    position: str,
    reference_points: Tensor | None,
) -> tuple[Any, ...]:
    """Samples lie inside and beside the maps, and away from pixel centres, where the gradient jumps."""
    generator = torch.Generator().manual_seed(0)

    def rand(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    def like(x: Tensor, original: Tensor) -> Tensor:
        return x.to(original.dtype).requires_grad_(original.requires_grad)

    batch, heads, dim = min(2, value.shape[0]), min(2, value.shape[2]), value.shape[3]
    levels, count = logits.shape[3:]
    shapes = torch.tensor([(max(2, 5 - level), max(3, 7 - level)) for level in range(levels)])
    areas = shapes.prod(1)
    samples = (batch, QUERIES, heads, levels, count)
    size = shapes.flip(-1).double()[:, None]  # (L, 1, 2) as (width, height)
    pixels = (rand(*samples, 2) * (size + 2)).floor() - 1.5 + 0.3 + 0.4 * rand(*samples, 2)  # centres at integers
    at = (pixels + 0.5) / size
    reference = None
    if reference_points is not None:
        centres = (0.2 + 0.6 * rand(batch, QUERIES, levels, 2)).to(reference_points.dtype)
        boxes = (0.2 + 0.2 * rand(batch, QUERIES, levels, 2)).to(reference_points.dtype)
        from_centre = at - centres.double()[:, :, None, :, None]
        if reference_points.shape[-1] == 2:
            at, reference = from_centre * size, centres
        else:
            at, reference = (
                from_centre * 2 * count / boxes.double()[:, :, None, :, None],
                torch.cat([centres, boxes], -1),
            )
        reference = like(reference, reference_points)
    of_gate = None
    if gate is not None:
        full = (1,) * (5 - gate.dim()) + tuple(gate.shape)
        shape = [1 if n == 1 else m for n, m in zip(full, samples, strict=True)]
        of_gate = like(rand(*shape) - 0.5, gate)
    return (
        like(rand(batch, int(areas.sum()), heads, dim) - 0.5, value),
        shapes,
        areas.cumsum(0) - areas,
        like(at, points),
        like(2 * rand(*samples) - 1, logits),
        of_gate,
        residual,
        position,
        reference,
    )


def _elements(value: Tensor, spatial_shapes: Tensor, level_start_index: Tensor, points: Tensor, *_: Any) -> int:
    return points.numel() // 2 * value.shape[-1]


PROBLEMS = Problems(_shape_class, _small, _elements)
