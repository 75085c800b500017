"""Multi-scale deformable attention from logits, with an optional gate on them.

Layout: value (B, S, H, D); spatial_shapes (L, 2) as (height, width); level_start_index (L,);
sampling_locations (B, Q, H, L, P, 2) as (x, y), 0 to 1 over a level; logits (B, Q, H, L, P); output (B, Q, H * D).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ..backend import Backend, find, register, run
from ..layout import broadcasts_to, check_integer, check_kinds
from ..library import is_compiling, is_exporting, outside_graphs
from . import cpu, grid_sample, mmcv, reference, triton
from .weights import POSITIONS, attention_weights, offset_locations

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
        backend: ``'torch'`` (reference), ``'cpu'``, ``'mmcv'`` (its CUDA operator), ``'grid_sample'`` (any device),
            ``'triton'`` (gate, softmax and sampling in one CUDA kernel) or ``'auto'``, the default: the first of the
            order that can run, see :mod:`mmgate.ops.backend`. The environment variable ``MMGATE_MS_DEFORM_ATTN`` has
            the last word.

    Returns:
        ``(B, Q, H * D)`` in the dtype of ``value``. Weights are formed in float32 for 16-bit inputs.

    Raises:
        TypeError: An argument is no tensor.
        ValueError: Shapes, dtypes or devices that do not go together, an unknown option or a backend that cannot run
            here; on the CPU also levels that do not lie within the values.

    Source: Deformable DETR (arXiv 2010.04159), Eq. 3; PLuG attention, Eq. 8 to 12.
    """
    _check(value, spatial_shapes, level_start_index, sampling_locations, logits, gate, position)
    if reference_points is not None:
        check_kinds(dict(logits=logits, reference_points=reference_points), one_dtype=False)
        reference_points = _checked_reference(reference_points, logits)
    if not all(value.shape[1:]) or not logits.shape[-1]:  # no level has a pixel, or there are no channels or points
        return value[:, :0].sum(1).flatten(1)[:, None].expand(-1, logits.shape[1], -1)
    inputs = (value, spatial_shapes, level_start_index, sampling_locations, logits)
    arguments = (*inputs, gate, residual, position, reference_points)
    return run('ms_deform_attn', BACKENDS, arguments, backend, (logits.numel(), *SIZES))


def _check(
    value: Tensor,
    spatial_shapes: Tensor,
    level_start_index: Tensor,
    sampling_locations: Tensor,
    logits: Tensor,
    gate: Tensor | None,
    position: str,
) -> None:
    if position not in POSITIONS:
        raise ValueError(f'position={position!r} is unknown; choose one of {", ".join(POSITIONS)}.')
    tensors = dict(value=value, sampling_locations=sampling_locations, logits=logits, gate=gate)
    check_kinds(tensors, one_dtype=False)
    check_integer('spatial_shapes', spatial_shapes, value)
    check_integer('level_start_index', level_start_index, value)
    if value.dim() != 4 or logits.dim() != 5:
        raise ValueError(
            f'value must be (B, S, H, D) and logits (B, Q, H, L, P), '
            f'got {tuple(value.shape)} and {tuple(logits.shape)}.'
        )
    batch, tokens, heads, _ = value.shape
    levels = logits.shape[3]
    if (logits.shape[0], logits.shape[2]) != (batch, heads):
        raise ValueError(f'logits {tuple(logits.shape)} and value {tuple(value.shape)} differ in batch or heads.')
    if tuple(sampling_locations.shape) != (*logits.shape, 2):
        raise ValueError(
            f'sampling_locations must be (B, Q, H, L, P, 2) = {(*logits.shape, 2)}, '
            f'got {tuple(sampling_locations.shape)}.'
        )
    if tuple(spatial_shapes.shape) != (levels, 2) or tuple(level_start_index.shape) != (levels,):
        raise ValueError(
            f'logits have {levels} levels, so spatial_shapes must be ({levels}, 2) and level_start_index ({levels},), '
            f'got {tuple(spatial_shapes.shape)} and {tuple(level_start_index.shape)}.'
        )
    if gate is not None and not broadcasts_to(gate.shape, logits.shape):
        raise ValueError(f'gate {tuple(gate.shape)} does not broadcast to the logits {tuple(logits.shape)}.')
    # Reading the sizes would stall a GPU and break a compiled graph; there the host layer has to be right.
    if not is_compiling() and not is_exporting() and spatial_shapes.device.type == 'cpu':
        _check_levels(spatial_shapes.tolist(), level_start_index.tolist(), tokens)


def _check_levels(sizes: list[list[int]], starts: list[int], tokens: int) -> None:
    areas = [height * width for height, width in sizes]
    if any(height < 0 or width < 0 for height, width in sizes):
        raise ValueError(f'spatial_shapes must not be negative, got {sizes}.')
    if sum(areas) != tokens:
        raise ValueError(f'value has {tokens} tokens, but spatial_shapes {sizes} hold {sum(areas)}.')
    if any(start < 0 or start + area > tokens for start, area in zip(starts, areas, strict=True)):
        raise ValueError(
            f'level_start_index {starts} with spatial_shapes {sizes} reaches beyond the {tokens} tokens of value.'
        )


def _checked_reference(reference_points: Tensor, logits: Tensor) -> Tensor:
    columns = reference_points.shape[-1] if reference_points.dim() else 0
    expected = (*logits.shape[:2], logits.shape[3], columns)
    if columns not in (2, 4):
        raise ValueError(f'reference_points must have 2 or 4 columns, got {columns}.')
    try:
        return reference_points.expand(expected)
    except RuntimeError:
        raise ValueError(
            f'reference_points must be (B, Q, L, {columns}) = {expected}, got {tuple(reference_points.shape)}.'
        ) from None


def check_backend(name: str) -> None:
    """Raise ValueError if ``name`` is neither ``'auto'`` nor the name of a backend."""
    if name != 'auto':
        find('ms_deform_attn', BACKENDS, name)


def _sampled(sample: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return how to attend by ``sample``, which takes finished locations and weights."""

    def attend(
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
        if reference_points is not None:
            points = offset_locations(points, reference_points, spatial_shapes)
        return sample(value, spatial_shapes, level_start_index, points, weights)

    return attend


BACKENDS = register(
    'ms_deform_attn',
    Backend('mmcv', mmcv.why_not, _sampled(mmcv.sample), words="mmcv's CUDA operator"),
    Backend('cpu', cpu.why_not, _sampled(cpu.sample), words='weighted sums of rows on the CPU'),
    Backend(
        'grid_sample', grid_sample.why_not, _sampled(grid_sample.sample), traceable=False, words="torch's grid_sample"
    ),
    Backend('torch', lambda value: None, _sampled(reference.sample), plain=True, words='the reference, slowly'),
    # No GPU has run it yet: 'auto' takes it where a calibration says so.
    Backend('triton', triton.why_not, triton.attend, in_order=False, words='one Triton kernel'),
)
