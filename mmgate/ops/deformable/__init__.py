"""The operator multi-scale deformable attention, computed from logits that a gate may multiply.

Layout: value (B, S, H, D); spatial_shapes (L, 2) as (height, width); level_start_index (L,);
sampling_locations (B, Q, H, L, P, 2) as (x, y), 0 to 1 over a level; logits (B, Q, H, L, P); output (B, Q, H * D).
With different numbers of points on the levels, one axis N, their sum, is there instead of L and P; see uneven.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..backend import OPERATORS, Backend, outside_graphs, run_operator
from ..native import advice_for_native, why_not_native
from . import grid_sample, mmcv, native_deformable, reference, triton_deformable
from .samples import POSITIONS, Samples, attention_weights, check, offset_locations
from .uneven import check_points

__all__ = ['POSITIONS', 'attention_weights', 'ms_deform_attn', 'offset_locations']


@outside_graphs
def ms_deform_attn(
    value: Tensor,
    spatial_shapes: Tensor,
    level_start_index: Tensor,
    sampling_locations: Tensor,
    logits: Tensor,
    gate: Tensor | None = None,
    *,
    residual: bool = True,
    position: str = 'pre_softmax',
    reference_points: Tensor | None = None,
    num_points: Sequence[int] | None = None,
    backend: str | None = None,
) -> Tensor:
    r"""Compute multi-scale deformable attention: sample all levels and sum by the softmax of (gated) logits.

    With ``A`` the logits, ``G`` the gate and ``F = 1 + G`` (or ``F = G`` without the residual), the weights are
    ``softmax(A F)`` over all levels and points of a head, or ``softmax(A) F`` after the softmax; the output of head
    ``h`` is :math:`\sum_{l,p} w_{hlp} \, v_{hl}(x_{hlp})` with bilinear samples, pixel centres at half-integers of
    the level, zero outside.

    With ``num_points`` level ``l`` has :math:`P_l` points: :math:`\sum_l \sum_{p=1}^{P_l} w_{hlp} \, v_{hl}(x_{hlp})`,
    the softmax over all :math:`N = \sum_l P_l` of them. Where a shape below has the axes ``L, P``, it then has one axis
    ``N``: the points of the first level, then those of the second, and so on.

    Args:
        value: Values of all levels, one after the other, ``(B, S, H, D)``, floating point.
        spatial_shapes: Height and width of the levels, ``(L, 2)``, integer; their areas sum to S.
        level_start_index: Index of each level's first value, ``(L,)``, integer.
        sampling_locations: ``(B, Q, H, L, P, 2)`` as (x, y); 0 and 1 are a level's outer edges, other values allowed.
        logits: Attention logits before the softmax, ``(B, Q, H, L, P)``.
        gate: Gate ``G`` that broadcasts to ``logits``; None leaves the logits as they are.
        residual: ``F = 1 + G``, as in Eq. 12, else ``F = G``.
        position: ``'pre_softmax'`` or ``'post_softmax'``.
        reference_points: Points ``(B, Q, L, 2)`` as (x, y) or boxes ``(B, Q, L, 4)`` as (centre, size), 0 to 1; then
            ``sampling_locations`` are offsets from them, see :func:`offset_locations`.
        num_points: Number of points of each level, positive, for levels with different numbers: then locations are
            ``(B, Q, H, N, 2)``, logits ``(B, Q, H, N)``, and the gate broadcasts to them. None: P for every level.
        backend: ``'torch'`` (reference), ``'native'`` (gate, softmax and sampling in one C++ loop on the CPU),
            ``'mmcv'`` (its CUDA operator), ``'triton'`` (one CUDA kernel), ``'grid_sample'`` (any device) or
            ``'auto'``, the default, see :mod:`mmgate.ops.backend`.

    Returns:
        ``(B, Q, H * D)`` in the dtype of ``value``. Weights are formed in float32 for 16-bit inputs.

    Raises:
        TypeError: An argument is no tensor.
        ValueError: Shapes, dtypes or devices that do not go together, numbers of points that do not fit the levels or
            the logits, an unknown option or a backend that cannot run here; on the CPU also levels that overlap or do
            not fill the values.

    Source: Deformable DETR (arXiv 2010.04159), Eq. 3; PLuG attention, Eq. 8 to 12; D-FINE's code for different numbers
    of points.
    """
    counts = None if num_points is None else check_points(num_points, len(spatial_shapes))
    samples = Samples(
        value=value,
        spatial_shapes=spatial_shapes,
        level_start_index=level_start_index,
        points=sampling_locations,
        logits=logits,
        gate=gate,
        residual=residual,
        position=position,
        reference_points=reference_points,
        num_points=counts,
    )
    check(samples)
    if not all(value.shape[1:]) or not logits.shape[-1]:  # no level has a pixel, or there are no channels or points
        return value[:, :0].sum(1).flatten(1)[:, None].expand(-1, logits.shape[1], -1)
    return run_operator('ms_deform_attn', value, backend, samples)


OPERATORS['ms_deform_attn'] = (
    Backend('mmcv', mmcv.attend, mmcv.why_not_mmcv, description="mmcv's CUDA operator"),
    Backend(
        'native',
        native_deformable.attend,
        why_not_native,
        description="mmgate's own C++ loop",
        advice=advice_for_native,
    ),
    Backend(
        'triton',
        triton_deformable.attend,
        triton_deformable.why_not_triton_deformable,
        place=triton_deformable.place_of_triton,
        description='one Triton kernel',
        advice=triton_deformable.advice_for_triton,
    ),
    Backend(
        'grid_sample',
        grid_sample.attend,
        grid_sample.why_not_grid_sample,
        traceable=False,
        description="torch's grid_sample",
    ),
    Backend('torch', reference.attend, exportable=True, description='the reference, slowly'),
)
