"""Multi-scale deformable attention by Triton kernels, as one operator with its gradient.

Unlike the other backends it takes logits, gate and, if wanted, offsets as they are: neither locations nor weights are
written to memory. On the CPU it runs only in Triton's interpreter (``TRITON_INTERPRET=1``), for tests.
"""

from __future__ import annotations

import functools
import inspect
import os
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..library import operator
from ..triton_backend import interpreted, on_device, padded, why_not
from .weights import attention_weights, offset_locations

__all__ = ['attend', 'split_of', 'why_not']
MOST_HEADS = 65_535  # the second axis of a grid
NUM_WARPS = 4
ORDER_BLOCK = 512
LANE_BYTES = 16  # of a piece of channels that a lane loads or adds at once; the value gradient is always float32
PIECES = 2  # of a row of channels
SCALAR_PIECES = 4  # where a lane adds one float at a time: eight lanes, 32 bytes, a piece at least
TUNED = ((1, 1), (1, 2), (1, 4), (1, 8), (2, 2), (2, 4))  # rows a lane and warps that MMGATE_TRITON_AUTOTUNE=1 tries


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
    """Attend from logits; arguments and return value as :func:`mmgate.ops.ms_deform_attn`.

    Raises:
        ValueError: Too many values, points or outputs an image for 32-bit offsets, or too many heads for a grid.
    """
    batch, _, heads, dim = value.shape
    sizes = dict(values=value.shape[1:].numel(), points=points.shape[1:].numel())
    sizes['outputs'] = points.shape[1] * heads * dim
    for name, size in sizes.items():
        if size >= 2**31:
            raise ValueError(
                f"ms_deform_attn: backend 'triton' takes fewer than 2^31 numbers an image, the {name} have {size}. "
                "Use 'mmcv' or 'torch'."
            )
    if batch * heads > MOST_HEADS:
        raise ValueError(
            f"ms_deform_attn: backend 'triton' takes up to {MOST_HEADS} heads of all images, got {batch} x {heads}. "
            'Use a smaller batch or another backend.'
        )
    reference = None if reference_points is None else reference_points.contiguous()
    return _fused(
        value.contiguous(),
        spatial_shapes.contiguous(),
        level_start_index.contiguous(),
        points.contiguous(),
        reference,
        logits.contiguous(),
        gate,
        residual,
        position == 'post_softmax',
    )[0]


def _launch(
    backward: bool, inputs: tuple[Any, ...], before: list[Tensor], after: list[Tensor], **switches: bool
) -> None:
    """Launch a kernel on the op's ``inputs``, and on what its pass has before and after them."""
    value, shapes, starts, points, reference, logits, gate, residual, post_softmax = inputs
    batch, tokens, heads, dim = value.shape
    _, queries, _, levels, count = logits.shape
    tiled = queries == tokens  # an encoder, where a query's neighbours in the map are known
    strides = (0,) * 5 if gate is None else gate.expand(logits.shape).stride()
    import triton

    constants = dict(
        LEVELS=levels,
        POINTS=count,
        PADDED=triton.next_power_of_2(levels * count),
        D=dim,
        TILED=tiled,
        REFERENCE=0 if reference is None else reference.shape[-1],
        GATED=gate is not None,
        RESIDUAL=residual,
        POST=post_softmax,
        **switches,
    )
    split = split_of(dim, value.element_size(), backward, backward and scalar_reductions(value.device))
    kernel = _kernel(backward, split if os.environ.get('MMGATE_TRITON_AUTOTUNE') == '1' and not interpreted() else None)
    fixed: dict[str, int] = {}
    if not hasattr(kernel, 'configs'):
        fixed = split.constants(NUM_WARPS)
        if interpreted():  # small blocks, so that small shapes have several
            fixed['BLOCK_Q'] = 4

    def grid(meta: dict[str, Any]) -> tuple[int, int]:
        return triton.cdiv(queries, meta['BLOCK_Q']), batch * heads

    # what is missing is not read
    reference, gate = points if reference is None else reference, logits if gate is None else gate
    with on_device(value):
        order = _tile_order(shapes, starts, tokens) if tiled else points
        tensors = [*before, value, shapes, starts, order, points, reference, logits, gate, *after]
        # sizes of images differ, their powers of two seldom
        kernel[grid](
            *tensors, tokens, queries, queries.bit_length(), heads, *strides, **constants, **fixed,
            enable_fp_fusion=True,  # Triton 3.10 turned it off by default
        )  # fmt: skip


def _tile_order(shapes: Tensor, starts: Tensor, tokens: int) -> Tensor:
    """Return all tokens in the order in which programs take them as queries."""
    import triton

    from .kernels import order_kernel

    order = torch.empty(tokens, dtype=torch.int32, device=shapes.device)
    order_kernel[triton.cdiv(tokens, ORDER_BLOCK),](
        shapes, starts, order, tokens, LEVELS=shapes.shape[0], BLOCK=ORDER_BLOCK, enable_fp_fusion=True
    )
    return order


@dataclass(frozen=True)
class Split:
    """How a warp shares work.

    Attributes:
        piece: Channels that the lanes of a row have at a time, a power of two.
        pieces: Pieces of a row.
        queries: Of a warp.
    """

    piece: int
    pieces: int
    queries: int

    def constants(self, num_warps: int, times: int = 1) -> dict[str, int]:
        """Return what a launch of ``num_warps`` warps takes, each with ``times`` as many queries."""
        queries = self.queries * times * num_warps
        return dict(PIECE=self.piece, PIECES=self.pieces, BLOCK_Q=queries, num_warps=num_warps)


def split_of(dim: int, itemsize: int, backward: bool, scalars: bool = False) -> Split:
    """Return the split for heads of ``dim`` channels of ``itemsize`` bytes.

    A lane has 16 bytes of every piece, of values or, backward, of float32 sums; one channel, if ``scalars``.
    """
    block = padded(dim)
    pieces = min(SCALAR_PIECES, block // 8) if scalars else PIECES
    piece = block // pieces
    lane = 1 if scalars else LANE_BYTES // (4 if backward else itemsize)
    return Split(piece, pieces, max(1, 32 * lane // piece) * (2 if backward else 1))


@functools.cache
def scalar_reductions(device: torch.device) -> bool:
    """Return whether the GPU adds one float at a time, as before sm_90: then neighbours belong into different lanes."""
    if interpreted():
        return False
    from triton.runtime import driver

    with torch.cuda.device(device) if device.type == 'cuda' else nullcontext():
        target = driver.active.get_current_target()
    return target.backend == 'cuda' and target.arch < 90


@functools.cache
def _kernel(backward: bool, tuned: Split | None) -> Any:
    import triton

    from .backward_kernel import backward_kernel
    from .kernels import forward_kernel

    kernel = backward_kernel if backward else forward_kernel
    if not tuned:
        return kernel
    configs = []
    for times, warps in TUNED:
        constants = tuned.constants(warps, times)
        configs.append(triton.Config(constants, num_warps=constants.pop('num_warps')))
    # Triton adds the dtypes to the key
    key = ['size_class', 'heads', 'LEVELS', 'POINTS', 'D', 'GATED', 'REFERENCE', 'TILED']
    kept = {'cache_results': True} if 'cache_results' in inspect.signature(triton.autotune).parameters else {}
    return triton.autotune(configs, key=key, reset_to_zero=['grad_value_ptr'] if backward else None, **kept)(kernel)


def _fake_fused(
    value: Tensor,
    spatial_shapes: Tensor,
    level_start_index: Tensor,
    points: Tensor,
    reference_points: Tensor | None,
    logits: Tensor,
    gate: Tensor | None,
    residual: bool,
    post_softmax: bool,
) -> tuple[Tensor, Tensor]:
    return _outputs(value, logits)


@operator('ms_deform_attn_fused', fake=_fake_fused)
def _fused(
    value: Tensor,
    spatial_shapes: Tensor,
    level_start_index: Tensor,
    points: Tensor,
    reference_points: Tensor | None,
    logits: Tensor,
    gate: Tensor | None,
    residual: bool,
    post_softmax: bool,
) -> tuple[Tensor, Tensor]:
    """Return the output, and log2 of every softmax's sum, ``(B, Q, H)`` float32."""
    inputs = (value, spatial_shapes, level_start_index, points, reference_points, logits, gate, residual, post_softmax)
    output, lse = _outputs(value, logits)
    if not value.numel():  # no level has a pixel
        return output.zero_(), lse.zero_()
    if logits.numel():
        _launch(False, inputs, [], [output, lse])
    return output, lse


def _outputs(value: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    batch, queries, heads = logits.shape[:3]
    output = value.new_empty(batch, queries, heads * value.shape[3])
    return output, logits.new_empty(batch, queries, heads, dtype=torch.float32)


def _fake_fused_backward(
    grad: Tensor,
    lse: Tensor,
    value: Tensor,
    spatial_shapes: Tensor,
    level_start_index: Tensor,
    points: Tensor,
    reference_points: Tensor | None,
    logits: Tensor,
    gate: Tensor | None,
    residual: bool,
    post_softmax: bool,
    grad_reference: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return tuple(_gradients(value, points, reference_points, logits, gate, grad_reference))  # type: ignore[return-value]


@operator('ms_deform_attn_fused_backward', fake=_fake_fused_backward)
def _fused_backward(
    grad: Tensor,
    lse: Tensor,
    value: Tensor,
    spatial_shapes: Tensor,
    level_start_index: Tensor,
    points: Tensor,
    reference_points: Tensor | None,
    logits: Tensor,
    gate: Tensor | None,
    residual: bool,
    post_softmax: bool,
    grad_reference: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of values, points, reference (a head's, float32), logits and gate (a logit's, float32)."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    grads = _gradients(value, points, reference_points, logits, gate, grad_reference)
    grads[0].zero_()
    inputs = (value, spatial_shapes, level_start_index, points, reference_points, logits, gate, residual, post_softmax)
    switches = dict(SCATTER=not deterministic, GRAD_REFERENCE=grad_reference)
    if not value.numel() or not logits.numel():
        return tuple(x.zero_() for x in grads)  # type: ignore[return-value]
    _launch(True, inputs, [grad.contiguous(), lse], grads, **switches)
    if deterministic:
        grads[0] = _sorted_value_gradient(grad, *inputs)
    return tuple(grads)  # type: ignore[return-value]


def _gradients(
    value: Tensor,
    points: Tensor,
    reference_points: Tensor | None,
    logits: Tensor,
    gate: Tensor | None,
    grad_reference: bool,
) -> list[Tensor]:
    shape = [*logits.shape[:4], reference_points.shape[-1]] if grad_reference and reference_points is not None else [0]
    return [
        torch.empty_like(value, dtype=torch.float32),
        torch.empty_like(points),
        points.new_empty(shape, dtype=torch.float32),
        torch.empty_like(logits),
        torch.empty_like(logits if gate is not None else logits[:0], dtype=torch.float32),
    ]


def _sorted_value_gradient(
    grad: Tensor,
    value: Tensor,
    spatial_shapes: Tensor,
    level_start_index: Tensor,
    points: Tensor,
    reference_points: Tensor | None,
    logits: Tensor,
    gate: Tensor | None,
    residual: bool,
    post_softmax: bool,
) -> Tensor:
    """The values' gradient without atomics: ``index_put_`` sorts its indices under deterministic algorithms."""
    batch, _, heads, dim = value.shape
    position = 'post_softmax' if post_softmax else 'pre_softmax'
    weights = attention_weights(logits.float(), gate, residual=residual, position=position)  # (B, Q, H, L, P)
    locations = points.float()
    if reference_points is not None:
        locations = offset_locations(locations, reference_points.float(), spatial_shapes)
    size = spatial_shapes.flip(-1)[:, None]  # (L, 1, 2) as (width, height)
    xy = locations * size - 0.5
    corner = xy.floor()
    fraction = xy - corner
    image = torch.arange(batch, device=value.device).view(-1, 1, 1, 1, 1)
    head = torch.arange(heads, device=value.device).view(-1, 1, 1)
    rows = grad.float().view(batch, -1, heads, 1, 1, dim)
    total = torch.zeros(value.shape, dtype=torch.float32, device=value.device)
    for dx, dy in ((0, 0), (1, 0), (0, 1), (1, 1)):
        x, y = corner[..., 0] + dx, corner[..., 1] + dy
        on_map = (x >= 0) & (x < size[..., 0]) & (y >= 0) & (y < size[..., 1])
        token = level_start_index[:, None] + torch.where(on_map, y * size[..., 0] + x, 0).long()
        across = fraction[..., 0] if dx else 1 - fraction[..., 0]
        down = fraction[..., 1] if dy else 1 - fraction[..., 1]
        share = torch.where(on_map, across * down, 0) * weights
        index = torch.broadcast_tensors(image, token, head)
        total.index_put_(tuple(index), share[..., None] * rows, accumulate=True)
    return total


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.residual, ctx.post_softmax = inputs
    ctx.save_for_backward(*tensors, output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    *tensors, lse = ctx.saved_tensors
    value, _, _, _, reference, _, gate = tensors
    of_reference = reference is not None and ctx.needs_input_grad[4]
    grad_value, grad_points, grad_reference, grad_logits, grad_gate = _fused_backward(
        grad, lse, *tensors, ctx.residual, ctx.post_softmax, of_reference
    )
    return (
        grad_value.to(value.dtype),
        None,
        None,
        grad_points,
        grad_reference.sum(2).to(reference.dtype) if of_reference else None,
        grad_logits,
        None if gate is None else grad_gate.sum_to_size(gate.shape).to(gate.dtype),
        None,
        None,
    )


_fused.differentiate(_backward, _setup_context)
