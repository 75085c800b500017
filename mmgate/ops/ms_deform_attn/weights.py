"""Compute sampling locations from offsets, and attention weights from gated logits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

POSITIONS = ('pre_softmax', 'post_softmax')
# Takes value, spatial_shapes, level_start_index, sampling locations and attention weights; returns (B, Q, H * D).
Sampler = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def offset_locations(offsets: Tensor, reference_points: Tensor, spatial_shapes: Tensor) -> Tensor:
    """Convert sampling offsets ``(B, Q, H, L, P, 2)`` around reference points to locations from 0 to 1.

    From points ``(B, Q, L, 2)`` an offset is counted in pixels of its level; from boxes ``(B, Q, L, 4)`` in half sizes
    of the box, divided by P. 16-bit offsets give float32 locations: bfloat16 has 8 bits for the whole side of a map.

    Source: Deformable DETR, Eq. 3 and appendix A.4.
    """
    if offsets.dtype in (torch.float16, torch.bfloat16):
        offsets = offsets.float()
        reference_points = reference_points.float()
    reference = reference_points[:, :, None, :, None]  # (B, Q, 1, L, 1, 2|4)
    if reference_points.shape[-1] == 2:
        return reference + offsets / spatial_shapes.flip(-1)[:, None]
    return reference[..., :2] + offsets / offsets.shape[-2] * reference[..., 2:] * 0.5


def attention_weights(
    logits: Tensor, gate: Tensor | None = None, *, residual: bool = True, position: str = 'pre_softmax'
) -> Tensor:
    """Apply gate and softmax to logits; return the attention weights ``(B, Q, H, L, P)``.

    They sum to 1 over (L, P), unless the gate acts after the softmax.

    Source: PLuG attention, Eq. 12 and (after the softmax) Eq. 17.
    """
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    if gate is not None:
        factor = 1 + gate.to(logits.dtype) if residual else gate.to(logits.dtype)
        if position == 'pre_softmax':
            logits = logits * factor
    weights = logits.flatten(-2).softmax(-1).view(logits.shape)  # over (L, P) together
    if gate is not None and position == 'post_softmax':
        weights = weights * factor
    return weights


def attend_by(sample: Sampler) -> Callable[..., Tensor]:
    """Make a backend's function of logits from a function that samples with given locations and weights.

    Args:
        sample: ``(value, spatial_shapes, level_start_index, sampling_locations, weights) -> (B, Q, H * D)``.
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
    ) -> Tensor:
        weights = attention_weights(logits, gate, residual=residual, position=position)
        locations = points
        if reference_points is not None:
            locations = offset_locations(points, reference_points, spatial_shapes)
        return sample(value, spatial_shapes, level_start_index, locations, weights)

    return attend
