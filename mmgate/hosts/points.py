"""Compute the sampling points of transformers' deformable attentions, gated or not; transformers is not imported."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor, nn


class DeformableAttention(Protocol):
    """Protocol of transformers' multi-scale deformable attentions: the attributes that all of them have."""

    n_heads: int
    n_levels: int
    n_points: int | Sequence[int]
    sampling_offsets: nn.Module
    attention_weights: nn.Module


def points_of(module: DeformableAttention) -> int:
    """Return the number of sampling points for each head and level of a deformable attention."""
    points = module.n_points
    return points if isinstance(points, int) else points[0]


def sampled(module: DeformableAttention, query: Tensor, reference_points: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sampling offsets ``(B, Q, H, L, P, 2)`` and logits ``(B, Q, H, L, P)`` of a query.

    ``query (B, Q, C)`` has its position; ``reference_points`` are ``(B, Q, L|1, 2 or 4)``.
    """
    sizes = (module.n_heads, module.n_levels, points_of(module))
    offsets = module.sampling_offsets(query).unflatten(-1, (*sizes, 2))
    if reference_points.shape[-1] == 4:
        # The operator moves points by half a box at most; D-FINE has an option for it.
        offsets = offsets * (2 * getattr(module, 'offset_scale', 0.5))
    return offsets, module.attention_weights(query).unflatten(-1, sizes)
