"""Multi-scale deformable attention from logits, with an optional gate on them.

Layout: value (B, S, H, D); spatial_shapes (L, 2) as (height, width); level_start_index (L,);
sampling_locations (B, Q, H, L, P, 2) as (x, y), 0 to 1 over a level; logits (B, Q, H, L, P); output (B, Q, H * D).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..backend import OPERATORS, Backend, anywhere, find, run
from ..layout import check_layout
from ..library import is_compiling, is_exporting, outside_graphs
from . import cpu, grid_sample, mmcv, native, reference, triton
from .weights import POSITIONS, Sampling, attention_weights, offset_locations

SIZES = (1 << 17, 1 << 20)  # samples of a small and a medium call, most often of decoders

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
    backend: str | None = None,
) -> Tensor:
    r"""Sample every level around each query and sum the samples by gated attention weights.

    With ``A`` the logits, ``G`` the gate and ``F = 1 + G`` (or ``F = G`` without the residual), the weights are
    ``softmax(A F)`` over all levels and points of a head, or ``softmax(A) F`` after the softmax; the output of head
    ``h`` is :math:`\sum_{l,p} w_{hlp} \, v_{hl}(x_{hlp})` with bilinear samples, pixel centres at half-integers of
    the level, zero outside.

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
        backend: ``'torch'`` (reference), ``'native'`` (gate, softmax and sampling in one C++ loop on the CPU),
            ``'cpu'``, ``'mmcv'`` (its CUDA operator), ``'grid_sample'`` (any device), ``'triton'`` (one CUDA kernel)
            or ``'auto'``, the default, see :mod:`mmgate.ops.backend`.

    Returns:
        ``(B, Q, H * D)`` in the dtype of ``value``. Weights are formed in float32 for 16-bit inputs.

    Raises:
        TypeError: An argument is no tensor.
        ValueError: Shapes, dtypes or devices that do not go together, an unknown option or a backend that cannot run
            here; on the CPU also levels that overlap or do not fill the values.

    Source: Deformable DETR (arXiv 2010.04159), Eq. 3; PLuG attention, Eq. 8 to 12.
    """
    call = Sampling(
        value, spatial_shapes, level_start_index, sampling_locations, logits, gate, residual, position, reference_points
    )
    _check(call)
    if not all(value.shape[1:]) or not logits.shape[-1]:  # no level has a pixel, or there are no channels or points
        return value[:, :0].sum(1).flatten(1)[:, None].expand(-1, logits.shape[1], -1)
    if reference_points is not None:
        batch, queries, _, levels, _ = logits.shape
        expanded = reference_points.expand(batch, queries, levels, reference_points.shape[-1])
        call = call._replace(reference_points=expanded)
    return run('ms_deform_attn', BACKENDS, call, backend, (logits.numel(), *SIZES))


def _check(call: Sampling) -> None:
    if call.position not in POSITIONS:
        raise ValueError(f'position={call.position!r} is unknown; choose one of {", ".join(POSITIONS)}.')
    check_layout(
        ('value', call.value, 'B S H D'),
        ('logits', call.logits, 'B Q H L P'),
        ('sampling_locations', call.points, 'B Q H L P 2'),
        ('spatial_shapes', call.spatial_shapes, 'L 2'),
        ('level_start_index', call.level_start_index, 'L'),
        ('gate', call.gate, 'B|1 Q|1 H|1 L|1 P|1'),
        ('reference_points', call.reference_points, 'B|1 Q|1 L|1 R'),
        integer='spatial_shapes level_start_index',
        one_dtype=False,
    )
    if call.reference_points is not None and call.reference_points.shape[-1] not in (2, 4):
        raise ValueError(f'reference_points must have 2 or 4 columns, got {call.reference_points.shape[-1]}.')
    # Reading the sizes would stall a GPU and break a compiled graph; there the host layer has to be right.
    if is_compiling() or is_exporting() or call.spatial_shapes.device.type != 'cpu':
        return
    sizes, starts = call.spatial_shapes.tolist(), call.level_start_index.tolist()
    tokens = call.value.shape[1]
    if any(height < 0 or width < 0 for height, width in sizes):
        raise ValueError(f'spatial_shapes must not be negative, got {sizes}.')
    areas = [height * width for height, width in sizes]
    if sum(areas) != tokens:
        raise ValueError(f'value has {tokens} tokens, but spatial_shapes {sizes} hold {sum(areas)}.')
    end, side_by_side = 0, all(0 <= start <= tokens for start in starts)
    for start, area in sorted((start, area) for start, area in zip(starts, areas, strict=True) if area):
        end, side_by_side = start + area, side_by_side and start == end
    if not side_by_side:
        raise ValueError(
            f'level_start_index {starts} with spatial_shapes {sizes} must lay the levels side by side over the '
            f'{tokens} tokens of value.'
        )


def check_backend(name: str) -> None:
    """Raise ConfigError if ``name`` is neither ``'auto'`` nor the name of a backend."""
    if name != 'auto':
        find('ms_deform_attn', BACKENDS, name)


def _sampled(sample: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return how to attend by ``sample``, which takes finished locations and weights."""

    def attend(*arguments: Any) -> Tensor:
        call = Sampling(*arguments)
        weights = attention_weights(call.logits, call.gate, residual=call.residual, position=call.position)
        points = call.points
        if call.reference_points is not None:
            points = offset_locations(points, call.reference_points, call.spatial_shapes)
        return sample(call.value, call.spatial_shapes, call.level_start_index, points, weights)

    return attend


BACKENDS = OPERATORS['ms_deform_attn'] = (
    Backend('mmcv', mmcv.why_not, _sampled(mmcv.sample), words="mmcv's CUDA operator"),
    Backend('native', native.why_not, native.attend, words="mmgate's own C++ loop", advice=native.advice),
    Backend('cpu', cpu.why_not, _sampled(cpu.sample), words='weighted sums of rows on the CPU'),
    Backend(
        'grid_sample',
        grid_sample.why_not,
        _sampled(grid_sample.sample),
        traceable=False,
        words="torch's grid_sample",
    ),
    Backend('torch', anywhere, _sampled(reference.sample), plain=True, words='the reference, slowly'),
    # No GPU has run it yet: 'auto' takes it where a calibration says so.
    Backend('triton', triton.why_not, triton.attend, in_order=False, words='one Triton kernel'),
)
