"""Compute the sampling points of transformers' deformable attentions, gated or not; transformers is not imported."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor, nn

from mmgate.ops.deformable.uneven import axes_of_samples, points_of_levels


class DeformableAttention(Protocol):
    """Protocol of transformers' multi-scale deformable attentions: the attributes that all of them have."""

    n_heads: int
    n_levels: int
    n_points: int | Sequence[int]
    sampling_offsets: nn.Module
    attention_weights: nn.Module


def points_of(module: DeformableAttention) -> int | tuple[int, ...]:
    """Return a deformable attention's number of sampling points per head and level, or one for each level.

    It is one number for each level if they differ.
    """
    return points_of_levels(module.n_points, module.n_levels)


def sampled(module: DeformableAttention, query: Tensor, reference_points: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sampling offsets ``(B, Q, H, L, P, 2)`` and logits ``(B, Q, H, L, P)`` of a query.

    Where its levels have different numbers of points, N in all, they are ``(B, Q, H, N, 2)`` and ``(B, Q, H, N)``.
    ``query (B, Q, C)`` has its position; ``reference_points`` are ``(B, Q, L|1, 2 or 4)``.
    """
    sizes = (module.n_heads, *axes_of_samples(points_of(module), module.n_levels))
    offsets = module.sampling_offsets(query).unflatten(-1, (*sizes, 2))
    if reference_points.shape[-1] == 4:
        # The operator moves points by half a box at most; D-FINE has an option for it.
        offsets = offsets * (2 * getattr(module, 'offset_scale', 0.5))
    return offsets, module.attention_weights(query).unflatten(-1, sizes)
