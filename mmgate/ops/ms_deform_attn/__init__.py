"""The operator multi-scale deformable attention, computed from logits that a gate may multiply.

Layout: value (B, S, H, D); spatial_shapes (L, 2) as (height, width); level_start_index (L,);
sampling_locations (B, Q, H, L, P, 2) as (x, y), 0 to 1 over a level; logits (B, Q, H, L, P); output (B, Q, H * D).
With different numbers of points on the levels, one axis N, their sum, is there instead of L and P; see uneven.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .. import triton_backend
from ..backend import OPERATORS, Backend, find, run
from ..custom_op import outside_graphs
from ..layout import check_layout
from ..tracing import is_compiling, is_exporting
from . import cpu, deformops, grid_sample, mmcv, native, reference, torch_ms_deform_attn, triton
from .uneven import as_given, by_padding, check_points
from .weights import POSITIONS, attend_by, attention_weights, offset_locations

SIZES = (1 << 17, 1 << 20)  # the most samples of a small and of a medium call, most often of decoders

__all__ = ['BACKENDS', 'POSITIONS', 'attention_weights', 'check_backend', 'ms_deform_attn', 'offset_locations']


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
            ``'cpu'``, ``'mmcv'`` (its CUDA operator), ``'torch_ms_deform_attn'`` and ``'deformops'`` (those packages),
            ``'grid_sample'`` (any device), ``'triton'`` (one CUDA kernel) or ``'auto'``, the default, see
            :mod:`mmgate.ops.backend`.

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
    arguments: dict[str, Any] = dict(
        value=value,
        spatial_shapes=spatial_shapes,
        level_start_index=level_start_index,
        points=sampling_locations,
        logits=logits,
        gate=gate,
        residual=residual,
        position=position,
        reference_points=reference_points,
        num_points=None if num_points is None else check_points(num_points, len(spatial_shapes)),
    )
    _check(**arguments)
    if not all(value.shape[1:]) or not logits.shape[-1]:  # no level has a pixel, or there are no channels or points
        return value[:, :0].sum(1).flatten(1)[:, None].expand(-1, logits.shape[1], -1)
    if reference_points is not None:
        batch, queries = logits.shape[:2]
        levels = logits.shape[3] if num_points is None else len(num_points)
        columns = reference_points.shape[-1]
        arguments['reference_points'] = reference_points.expand(batch, queries, levels, columns)
    return run('ms_deform_attn', BACKENDS, value, backend, (logits.numel(), *SIZES), **arguments)


def _check(
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
    num_points: tuple[int, ...] | None,
) -> None:
    """Raise an error for arguments that no backend takes; each backend checks what it alone does not support.

    ``points`` are sampling locations, or offsets if there are reference points.
    """
    if position not in POSITIONS:
        raise ValueError(f'position={position!r} is unknown; choose one of {", ".join(POSITIONS)}.')
    of_samples = 'L P'
    of_gate = 'L|1 P|1'
    if num_points is not None:
        of_samples = f'{sum(num_points)}'
        of_gate = f'{sum(num_points)}|1'
    check_layout(
        ('value', value, 'B S H D'),
        ('logits', logits, f'B Q H {of_samples}'),
        ('sampling_locations', points, f'B Q H {of_samples} 2'),
        ('spatial_shapes', spatial_shapes, 'L 2'),
        ('level_start_index', level_start_index, 'L'),
        ('gate', gate, f'B|1 Q|1 H|1 {of_gate}'),
        ('reference_points', reference_points, 'B|1 Q|1 L|1 R'),
        integer='spatial_shapes level_start_index',
        one_dtype=False,
    )
    if reference_points is not None and reference_points.shape[-1] not in (2, 4):
        raise ValueError(f'reference_points must have 2 or 4 columns, got {reference_points.shape[-1]}.')
    # Reading the sizes would stall a GPU and break a compiled graph; there the host layer has to be right.
    if not is_compiling() and not is_exporting() and spatial_shapes.device.type == 'cpu':
        _check_levels(spatial_shapes.tolist(), level_start_index.tolist(), value.shape[1])


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


def check_backend(name: str) -> None:
    """Raise ConfigError if ``name`` is neither ``'auto'`` nor the name of a backend."""
    if name != 'auto':
        find('ms_deform_attn', BACKENDS, name)


BACKENDS = OPERATORS['ms_deform_attn'] = (
    Backend('mmcv', attend_by(mmcv.sample, by_padding), mmcv.why_not, description="mmcv's CUDA operator"),
    Backend('native', native.attend, native.why_not, description="mmgate's own C++ loop", advice=native.advice),
    Backend(
        'torch_ms_deform_attn',
        attend_by(torch_ms_deform_attn.sample, by_padding),
        torch_ms_deform_attn.why_not,
        description="torch-ms-deform-attn's operator",
    ),
    Backend('deformops', deformops.attend, deformops.why_not, description="deformops' kernels"),
    Backend(
        'triton',
        triton.attend,
        triton.why_not,
        in_order=triton_backend.in_order,
        first=triton_backend.first,
        description='one Triton kernel',
    ),
    Backend('cpu', attend_by(cpu.sample), cpu.why_not, description='weighted sums of rows on the CPU'),
    Backend(
        'grid_sample',
        attend_by(grid_sample.sample, as_given),
        grid_sample.why_not,
        traceable=False,
        description="torch's grid_sample",
    ),
    Backend('torch', attend_by(reference.sample), exportable=True, description='the reference, slowly'),
)
