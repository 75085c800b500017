"""The arguments of deformable attention, and the locations and weights that are formed from them.

:class:`Samples` is what the operator checks and every backend gets: logits, gate and, if wanted, offsets. A backend
that samples with finished locations and weights takes :class:`WeightedSamples`, by :func:`weighted`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..layout import POSITIONS, check_layout
from ..tracing import is_compiling, is_exporting
from .uneven import OFF, pad_points, spread


class Samples(NamedTuple):
    """Arguments of deformable attention; see :func:`mmgate.ops.ms_deform_attn` for shapes and meanings.

    With ``num_points`` the axes ``L, P`` are one axis ``N``.

    Attributes:
        value: ``(B, S, H, D)``.
        spatial_shapes: ``(L, 2)``.
        level_start_index: ``(L,)``.
        points: Sampling locations, or offsets if there are reference points, ``(B, Q, H, L, P, 2)``.
        logits: ``(B, Q, H, L, P)``.
        gate: Broadcasts to ``logits``, or None.
        residual: True for the factor ``1 + G``, False for ``G``.
        position: One of :data:`POSITIONS`.
        reference_points: ``(B, Q, L, 2|4)``, or None.
        num_points: Number of points of each level, or None if all have P.
    """

    value: Tensor
    spatial_shapes: Tensor
    level_start_index: Tensor
    points: Tensor
    logits: Tensor
    gate: Tensor | None = None
    residual: bool = True
    position: str = 'pre_softmax'
    reference_points: Tensor | None = None
    num_points: Sequence[int] | None = None


class WeightedSamples(NamedTuple):
    """Samples with finished locations and attention weights: what remains is to sample and to sum.

    Attributes:
        value: ``(B, S, H, D)``.
        spatial_shapes: ``(L, 2)`` as (height, width), integer.
        level_start_index: ``(L,)``, integer.
        locations: ``(B, Q, H, L, P, 2)`` as (x, y), 0 to 1 over a level; ``(B, Q, H, N, 2)`` with ``num_points``.
        weights: Attention weights ``(B, Q, H, L, P)``; ``(B, Q, H, N)`` with ``num_points``.
        num_points: Number of points of each level, or None if all have P.
    """

    value: Tensor
    spatial_shapes: Tensor
    level_start_index: Tensor
    locations: Tensor
    weights: Tensor
    num_points: Sequence[int] | None = None


def check(samples: Samples) -> None:
    """Check that samples are such as a backend can take; each backend checks what it alone does not support.

    Raises:
        TypeError: An argument is no tensor.
        ValueError: See :func:`mmgate.ops.ms_deform_attn`.
    """
    if samples.position not in POSITIONS:
        raise ValueError(f'position={samples.position!r} is unknown; choose one of {", ".join(POSITIONS)}.')
    of_samples = 'L P'
    of_gate = 'L|1 P|1'
    if samples.num_points is not None:
        of_samples = f'{sum(samples.num_points)}'
        of_gate = f'{of_samples}|1'
    check_layout(
        ('value', samples.value, 'B S H D'),
        ('logits', samples.logits, f'B Q H {of_samples}'),
        ('sampling_locations', samples.points, f'B Q H {of_samples} 2'),
        ('spatial_shapes', samples.spatial_shapes, 'L 2'),
        ('level_start_index', samples.level_start_index, 'L'),
        ('gate', samples.gate, f'B|1 Q|1 H|1 {of_gate}'),
        ('reference_points', samples.reference_points, 'B|1 Q|1 L|1 R'),
        integer='spatial_shapes level_start_index',
        one_dtype=False,
    )
    if samples.reference_points is not None and samples.reference_points.shape[-1] not in (2, 4):
        raise ValueError(f'reference_points must have 2 or 4 columns, got {samples.reference_points.shape[-1]}.')
    # Reading the sizes would stall a GPU and break a compiled graph; there the layer around has to be right.
    if not is_compiling() and not is_exporting() and samples.spatial_shapes.device.type == 'cpu':
        _check_levels(samples.spatial_shapes.tolist(), samples.level_start_index.tolist(), samples.value.shape[1])


def _check_levels(sizes: list[list[int]], starts: list[int], tokens: int) -> None:
    """Raise ValueError unless the levels, by size and start, fill all tokens without gaps or overlaps."""
    if any(height < 0 or width < 0 for height, width in sizes):
        raise ValueError(f'spatial_shapes must not be negative, got {sizes}.')
    areas = [height * width for height, width in sizes]
    if sum(areas) != tokens:
        raise ValueError(f'value has {tokens} tokens, but spatial_shapes {sizes} hold {sum(areas)}.')
    side_by_side = all(0 <= start <= tokens for start in starts)
    end = 0
    for start, area in sorted((start, area) for start, area in zip(starts, areas, strict=True) if area):
        side_by_side = side_by_side and start == end
        end = start + area
    if not side_by_side:
        raise ValueError(
            f'level_start_index {starts} with spatial_shapes {sizes} must lay the levels side by side over the '
            f'{tokens} tokens of value.'
        )


def reference_of(samples: Samples) -> Tensor | None:
    """Return the reference points for each image, query and level, ``(B, Q, L, 2|4)``, or None."""
    reference_points = samples.reference_points
    if reference_points is None:
        return None
    batch, queries = samples.logits.shape[:2]
    levels = samples.logits.shape[3] if samples.num_points is None else len(samples.num_points)
    return reference_points.expand(batch, queries, levels, reference_points.shape[-1])


def in_memory(samples: Samples, *, double: bool = False) -> Samples:
    """Return samples as kernels read them: contiguous but for the gate, which they read by its strides.

    The levels' sizes and starts have 64 bits, the reference points all axes, and the values, if wanted, float64.
    """
    reference_points = reference_of(samples)
    return Samples(
        value=(samples.value.double() if double else samples.value).contiguous(),
        spatial_shapes=samples.spatial_shapes.long().contiguous(),
        level_start_index=samples.level_start_index.long().contiguous(),
        points=samples.points.contiguous(),
        logits=samples.logits.contiguous(),
        gate=samples.gate,
        residual=samples.residual,
        position=samples.position,
        reference_points=None if reference_points is None else reference_points.contiguous(),
        num_points=None if samples.num_points is None else list(samples.num_points),
    )


def weighted(samples: Samples) -> WeightedSamples:
    """Form the locations and the attention weights of samples, in memory."""
    locations = samples.points
    reference_points = reference_of(samples)
    if reference_points is not None:
        locations = offset_locations(samples.points, reference_points, samples.spatial_shapes, samples.num_points)
    return WeightedSamples(
        value=samples.value,
        spatial_shapes=samples.spatial_shapes,
        level_start_index=samples.level_start_index,
        locations=locations,
        weights=attention_weights(samples.logits, samples.gate, residual=samples.residual, position=samples.position),
        num_points=samples.num_points,
    )


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


def one_point_levels(samples: WeightedSamples) -> WeightedSamples:
    """Give each sample a level with this one point, if the levels have different numbers of points.

    Several of these levels are the same pixels.
    """
    if samples.num_points is None:
        return samples
    return WeightedSamples(
        value=samples.value,
        spatial_shapes=spread(samples.spatial_shapes, samples.num_points, 0),  # (N, 2)
        level_start_index=spread(samples.level_start_index, samples.num_points, 0),  # (N,)
        locations=samples.locations[..., None, :],  # (B, Q, H, N, 1, 2)
        weights=samples.weights[..., None],  # (B, Q, H, N, 1)
    )


def padded_levels(samples: WeightedSamples) -> WeightedSamples:
    """Pad levels with different numbers of points to the largest number, by points of weight 0 that lie off the map."""
    if samples.num_points is None:
        return samples
    return WeightedSamples(
        value=samples.value,
        spatial_shapes=samples.spatial_shapes,
        level_start_index=samples.level_start_index,
        locations=pad_points(samples.locations, samples.num_points, OFF),  # (B, Q, H, L, P, 2)
        weights=pad_points(samples.weights, samples.num_points, 0.0),  # (B, Q, H, L, P)
    )


def gradients_of_fields(
    samples: Samples,
    *,
    of_value: Tensor | None,
    of_points: Tensor,
    of_logits: Tensor,
    of_gate: Tensor,
    of_reference: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """Return a gradient for each field of :class:`Samples`, None for what has none, in the dtypes of the fields.

    Args:
        samples: The samples.
        of_value: As the values, or None if they need no gradient.
        of_points: As the points.
        of_logits: As the logits.
        of_gate: The gate's gradient, by logit or already summed over an axis. It is not read without a gate.
        of_reference: That of the reference points, by head, or None if they need no gradient.
    """
    gradients: dict[str, Tensor] = dict(points=of_points, logits=of_logits)
    if of_value is not None:
        gradients['value'] = of_value.to(samples.value.dtype)
    if samples.gate is not None:
        gradients['gate'] = of_gate.sum_to_size(samples.gate.shape).to(samples.gate.dtype)
    if samples.reference_points is not None and of_reference is not None:
        gradients['reference_points'] = of_reference.sum(2).to(samples.reference_points.dtype)
    return tuple(gradients.get(name) for name in Samples._fields)
