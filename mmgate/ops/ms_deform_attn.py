"""Multi-scale deformable attention from logits, with an optional gate on them.

Layout: value (B, S, H, D); spatial_shapes (L, 2) as (height, width); level_start_index (L,);
sampling_locations (B, Q, H, L, P, 2) as (x, y), 0 to 1 over a level; logits (B, Q, H, L, P); output (B, Q, H * D).
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import ms_deform_attn_cpu, ms_deform_attn_mmcv, ms_deform_attn_triton, triton_backend
from .dispatch import Backend, find, select
from .library import is_compiling, outside_graphs

POSITIONS = ('pre_softmax', 'post_softmax')


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
        backend: ``'torch'`` (reference), ``'cpu'``, ``'mmcv'`` (its CUDA operator), ``'triton'`` (gate, softmax and
            sampling in one CUDA kernel) or ``'auto'``, the default. The environment variable
            ``MMGATE_MS_DEFORM_ATTN`` has the last word.

    Returns:
        ``(B, Q, H * D)`` in the dtype of ``value``. Weights are formed in float32 for 16-bit inputs.

    Raises:
        ValueError: Shapes that do not go together, an unknown option or a backend that cannot run here.

    Source: Deformable DETR (arXiv 2010.04159), Eq. 3; PLuG attention, Eq. 8 to 12.
    """
    _check(value, spatial_shapes, level_start_index, sampling_locations, logits, gate, position)
    if reference_points is not None:
        reference_points = _checked_reference(reference_points, logits)
    if backend in (None, 'auto') and ms_deform_attn_triton.preferred(value):
        backend = 'triton'
    chosen = select('ms_deform_attn', BACKENDS, value, backend)
    if chosen.name == 'triton':
        inputs = (value, spatial_shapes, level_start_index, sampling_locations, logits)
        return chosen.run(*inputs, gate, residual, position, reference_points)
    weights = attention_weights(logits, gate, residual=residual, position=position)
    locations = sampling_locations
    if reference_points is not None:
        locations = offset_locations(locations, reference_points, spatial_shapes)
    return chosen.run(value, spatial_shapes, level_start_index, locations, weights)


def offset_locations(offsets: Tensor, reference_points: Tensor, spatial_shapes: Tensor) -> Tensor:
    """Return sampling locations from offsets ``(B, Q, H, L, P, 2)``.

    From points ``(B, Q, L, 2)`` an offset is counted in pixels of its level; from boxes ``(B, Q, L, 4)`` in half sizes
    of the box, divided by P. 16-bit offsets give float32 locations: bfloat16 has 8 bits for the whole side of a map.

    Source: Deformable DETR, Eq. 3 and appendix A.4.
    """
    if offsets.dtype in (torch.float16, torch.bfloat16):
        offsets, reference_points = offsets.float(), reference_points.float()
    reference = reference_points[:, :, None, :, None]  # (B, Q, 1, L, 1, 2|4)
    if reference_points.shape[-1] == 2:
        return reference + offsets / spatial_shapes.flip(-1)[:, None]
    return reference[..., :2] + offsets / offsets.shape[-2] * reference[..., 2:] * 0.5


def attention_weights(
    logits: Tensor, gate: Tensor | None = None, *, residual: bool = True, position: str = 'pre_softmax'
) -> Tensor:
    """Return the weights ``(B, Q, H, L, P)`` of :func:`ms_deform_attn`; they sum to 1 over (L, P) unless gated after.

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


def sample_reference(
    value: Tensor, spatial_shapes: Tensor, level_start_index: Tensor, sampling_locations: Tensor, weights: Tensor
) -> Tensor:
    """Reference of the weighted sampling: plain indexing, differentiable by autograd, no loop over levels.

    Args and return value as in :func:`ms_deform_attn`, with attention ``weights`` in the place of the logits.
    """
    batch, _, heads, dim = value.shape
    queries = sampling_locations.shape[1]
    locations, weights = sampling_locations.to(weights.dtype), weights
    size = spatial_shapes.flip(-1)[:, None]  # (L, 1, 2) as (width, height)
    xy = locations * size - 0.5  # pixel centres become integers
    corner = xy.floor().detach()
    fraction = xy - corner  # (B, Q, H, L, P, 2) in [0, 1)
    b = torch.arange(batch, device=value.device).view(-1, 1, 1, 1, 1)
    h = torch.arange(heads, device=value.device).view(-1, 1, 1)

    output = weights.new_zeros(batch, queries, heads, dim)
    for dx, dy in ((0, 0), (1, 0), (0, 1), (1, 1)):
        x, y = corner[..., 0] + dx, corner[..., 1] + dy  # (B, Q, H, L, P)
        inside = (x >= 0) & (x < size[..., 0]) & (y >= 0) & (y < size[..., 1])
        index = level_start_index[:, None] + torch.where(inside, y * size[..., 0] + x, 0).long()
        fx = fraction[..., 0] if dx else 1 - fraction[..., 0]
        fy = fraction[..., 1] if dy else 1 - fraction[..., 1]
        bilinear = torch.where(inside, fx * fy, 0)
        samples = value[b, index, h]  # (B, Q, H, L, P, D)
        output = output + ((weights * bilinear)[..., None] * samples).sum((3, 4))
    return output.flatten(2).to(value.dtype)


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
    if gate is not None and torch.broadcast_shapes(gate.shape, logits.shape) != logits.shape:
        raise ValueError(f'gate {tuple(gate.shape)} does not broadcast to the logits {tuple(logits.shape)}.')
    # Reading the sizes would stall a GPU and break a compiled graph; there the host layer has to be right.
    if not is_compiling() and spatial_shapes.device.type == 'cpu':
        areas = int(spatial_shapes.prod(-1).sum())
        if areas != tokens:
            raise ValueError(f'value has {tokens} tokens, but spatial_shapes {spatial_shapes.tolist()} hold {areas}.')


def _checked_reference(reference_points: Tensor, logits: Tensor) -> Tensor:
    columns = reference_points.shape[-1]
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


BACKENDS = (
    Backend('mmcv', ms_deform_attn_mmcv.why_not, ms_deform_attn_mmcv.sample),
    Backend('cpu', ms_deform_attn_cpu.why_not, ms_deform_attn_cpu.sample),
    Backend('torch', lambda value: None, sample_reference),
    # Behind the reference, so that 'auto' takes it only where it is preferred by measurement.
    Backend('triton', triton_backend.why_not, ms_deform_attn_triton.attend),
)
