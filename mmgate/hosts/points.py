"""Compute the sampling points of deformable attentions of transformers and of cloned projects; neither is imported."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mmgate.ops.deformable.uneven import axes_of_samples, points_of_levels


def points_of(module: Any) -> int | tuple[int, ...]:
    """Return the sampling points per head and level of an attention with the names of Deformable DETR's repository.

    It is one number for each level if they differ.
    """
    return points_of_levels(module.n_points, module.n_levels)


def sampled(
    module: Any, query: Tensor, reference_points: Tensor, sizes: tuple[int, ...] | None = None
) -> tuple[Tensor, Tensor]:
    """Return the sampling offsets ``(B, Q, H, L, P, 2)`` and logits ``(B, Q, H, L, P)`` of a query.

    Where its levels have different numbers of points, N in all, they are ``(B, Q, H, N, 2)`` and ``(B, Q, H, N)``.

    Args:
        module: The deformable attention.
        query: ``(B, Q, C)``, with its position.
        reference_points: ``(B, Q, L|1, 2 or 4)``.
        sizes: (H, L, P) or (H, N), for an attention that has other names than Deformable DETR's repository.
    """
    if sizes is None:
        sizes = (module.n_heads, *axes_of_samples(points_of(module), module.n_levels))
    offsets = module.sampling_offsets(query).unflatten(-1, (*sizes, 2))
    # The operator moves points by half a box at most; D-FINE and RT-DETRv2 have an option for it.
    scale = getattr(module, 'offset_scale', 0.5)
    if reference_points.shape[-1] == 4 and scale != 0.5:
        offsets = offsets * (2 * scale)
    return offsets, module.attention_weights(query).unflatten(-1, sizes)
