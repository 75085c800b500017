"""Compute sampling locations from offsets, and attention weights from gated logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..tracing import is_exporting
from .uneven import Sampler, Uneven, by_sample, spread

POSITIONS = ('pre_softmax', 'post_softmax')


def offset_locations(
    offsets: Tensor, reference_points: Tensor, spatial_shapes: Tensor, num_points: Sequence[int] | None = None
) -> Tensor:
    """Convert sampling offsets around reference points to locations from 0 to 1.

    Offsets are ``(B, Q, H, L, P, 2)``, or ``(B, Q, H, N, 2)`` with ``num_points``.

    From points ``(B, Q, L, 2)`` an offset is counted in pixels of its level; from boxes ``(B, Q, L, 4)`` in half sizes
    of the box, divided by the level's number of points. 16-bit offsets give float32 locations: bfloat16 has 8 bits for
    the whole side of a map.

    Source: Deformable DETR, Eq. 3 and appendix A.4; D-FINE's code for levels of different numbers of points.
    """
    if offsets.dtype in (torch.float16, torch.bfloat16):
        offsets = offsets.float()
        reference_points = reference_points.float()
    sizes = spatial_shapes.flip(-1)  # (L, 2) as (width, height)
    if not is_exporting():  # where every level has pixels; a division by 0 would make the gradients NaN
        sizes = sizes.clamp(min=1)
    count: int | Tensor
    if num_points is None:
        reference = reference_points[:, :, None, :, None]  # (B, Q, 1, L, 1, 2|4)
        sizes = sizes[:, None]  # (L, 1, 2)
        count = offsets.shape[-2]
    else:
        reference = spread(reference_points, num_points, 2)[:, :, None]  # (B, Q, 1, N, 2|4)
        sizes = spread(sizes, num_points, 0)  # (N, 2)
        count = counts_like(offsets, num_points)
    if reference_points.shape[-1] == 2:
        return reference + offsets / sizes
    return reference[..., :2] + offsets / count * reference[..., 2:] * 0.5


def counts_like(x: Tensor, num_points: Sequence[int]) -> Tensor:
    """Return for each sample how many points its level has, ``(N, 1)`` in the dtype of ``x``."""
    return torch.cat([x.new_full((count, 1), count) for count in num_points])


def attention_weights(
    logits: Tensor, gate: Tensor | None = None, *, residual: bool = True, position: str = 'pre_softmax'
) -> Tensor:
    """Apply gate and softmax to logits, and return the attention weights in the shape of the logits.

    Logits are ``(B, Q, H, L, P)`` or, of levels with different numbers of points, ``(B, Q, H, N)``. The weights of a
    query and head sum to 1 unless they are gated after the softmax.

    Source: PLuG attention, Eq. 12 and (after the softmax) Eq. 17.
    """
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    if gate is not None:
        factor = 1 + gate.to(logits.dtype) if residual else gate.to(logits.dtype)
        if position == 'pre_softmax':
            logits = logits * factor
    weights = logits.flatten(3).softmax(-1).view(logits.shape)  # over all samples of a head
    if gate is not None and position == 'post_softmax':
        weights = weights * factor
    return weights


def attend_by(sample: Sampler, uneven: Uneven = by_sample) -> Callable[..., Tensor]:
    """Make a backend's function of logits from a function that samples with given locations and weights.

    Args:
        sample: ``(value, spatial_shapes, level_start_index, sampling_locations, weights) -> (B, Q, H * D)``.
        uneven: How the sampler is called for levels with different numbers of points, see :mod:`.uneven`.
    """

    def attend(
        *,
        value: Tensor,
        spatial_shapes: Tensor,
        level_start_index: Tensor,
        points: Tensor,
        logits: Tensor,
        gate: Tensor | None,
        residual: bool,
        position: str,
        reference_points: Tensor | None,
        num_points: Sequence[int] | None = None,
    ) -> Tensor:
        weights = attention_weights(logits, gate, residual=residual, position=position)
        locations = points
        if reference_points is not None:
            locations = offset_locations(points, reference_points, spatial_shapes, num_points)
        if num_points is None:
            return sample(value, spatial_shapes, level_start_index, locations, weights)
        return uneven(sample, num_points, value, spatial_shapes, level_start_index, locations, weights)

    return attend
