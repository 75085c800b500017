"""GPU backend of deformable attention by mmgate's Triton kernels, as one custom operator with its gradient.

Unlike the other backends it takes logits, gate and, if wanted, offsets as they are: neither locations nor weights are
written to memory. On the CPU it runs only in Triton's interpreter (``TRITON_INTERPRET=1``), for tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mmgate.errors import UnsupportedCall

from .. import triton_backend
from ..custom_op import operator
from ..triton_backend import interpreted, launch
from . import blocks
from .blocks import cut_for
from .uneven import spread
from .weights import counts_like

MOST_NUMBERS = 2**31  # an image, for 32-bit offsets
MOST_HEADS = 65_535  # the second axis of a grid
ORDER_BLOCK = 512


def why_not(value: Tensor) -> str | None:
    """Return the reason why this backend cannot run on ``value``, or None if it can."""
    if torch.are_deterministic_algorithms_enabled():
        return 'it adds up the gradients of the values in no fixed order, and torch.use_deterministic_algorithms is on'
    return triton_backend.why_not(value)


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
    """Compute deformable attention from logits; the arguments are those of :func:`mmgate.ops.ms_deform_attn`.

    ``points`` are sampling locations, or offsets if there are reference points. With ``num_points`` the kernels get a
    level of one point for each sample, so that they skip what is not there.

    Raises:
        UnsupportedCall: Too many values, points or outputs an image for 32-bit offsets, or too many heads for a grid.
    """
    if num_points is not None:
        if reference_points is not None:
            reference_points = spread(reference_points.float(), num_points, 2)  # (B, Q, N, R)
            if reference_points.shape[-1] == 4:  # the kernels divide the sizes of boxes by one point
                centres, sizes = reference_points.split(2, -1)
                reference_points = torch.cat([centres, sizes / counts_like(sizes, num_points)], -1)
        spatial_shapes = spread(spatial_shapes, num_points, 0)
        level_start_index = spread(level_start_index, num_points, 0)
        points = points[..., None, :]  # (B, Q, H, N, 1, 2)
        logits = logits[..., None]
        gate = None if gate is None else gate[..., None]
    _check_sizes(value, points, logits, reference_points)
    if gate is not None:
        # The kernels read a gate with its strides, unless 32-bit offsets do not reach its last number.
        strides = gate.expand(logits.shape).stride()
        last = sum((n - 1) * stride for n, stride in zip(logits.shape[1:], strides[1:], strict=True))
        if last >= MOST_NUMBERS:
            gate = gate.contiguous()
    output, _ = _operator(
        value.contiguous(),
        spatial_shapes.contiguous(),
        level_start_index.contiguous(),
        points.contiguous(),
        logits.contiguous(),
        gate,
        residual,
        position,
        None if reference_points is None else reference_points.contiguous(),
    )
    return output


def _check_sizes(value: Tensor, points: Tensor, logits: Tensor, reference_points: Tensor | None) -> None:
    batch, _, heads, dim = value.shape
    sizes = {
        'values': value.shape[1:].numel(),
        'points': points.shape[1:].numel(),
        'outputs': points.shape[1] * heads * dim,
    }
    if reference_points is not None:  # whose gradient is a head's
        sizes['reference points'] = logits.shape[1:4].numel() * reference_points.shape[-1]
    takes = "ms_deform_attn: 'triton' takes"
    for name, size in sizes.items():
        if size >= MOST_NUMBERS:
            raise UnsupportedCall(
                f"{takes} fewer than 2^31 numbers an image, the {name} are {size}; use 'mmcv' or 'torch'."
            )
    if batch * heads > MOST_HEADS:
        raise UnsupportedCall(
            f'{takes} up to {MOST_HEADS} heads of all images, got {batch} x {heads}; use a smaller batch.'
        )


def _launch(
    backward: bool,
    inputs: tuple[Tensor, ...],
    outputs: tuple[Tensor, ...],
    value: Tensor,
    spatial_shapes: Tensor,
    level_start_index: Tensor,
    points: Tensor,
    logits: Tensor,
    gate: Tensor | None,
    residual: bool,
    position: str,
    reference_points: Tensor | None,
    **switches: bool,
) -> None:
    """Launch the forward or the backward kernel with its block sizes.

    Args:
        backward: The kernel of the backward pass.
        inputs: The tensors that this pass alone reads, which come before the operator's in the kernel's signature.
        outputs: The tensors that it writes, which come last.
        value: As the following, an argument of the operator.
        spatial_shapes: See above.
        level_start_index: See above.
        points: See above.
        logits: See above.
        gate: See above.
        residual: See above.
        position: See above.
        reference_points: See above.
        **switches: Constants that this pass alone has.
    """
    import triton

    from .backward_kernel import backward_kernel
    from .kernels import forward_kernel

    batch, tokens, heads, dim = value.shape
    _, queries, _, levels, count = logits.shape
    cut = cut_for(value, logits, backward)
    constants: dict[str, Any] = dict(
        LEVELS=levels,
        POINTS=count,
        PADDED=triton.next_power_of_2(levels * count),
        D=dim,
        GATED=gate is not None,
        RESIDUAL=residual,
        POST=position == 'post_softmax',
        TILED=cut.tiled,
        REFERENCE=0 if reference_points is None else reference_points.shape[-1],
        **switches,
        **cut.constants(dim),
    )
    if interpreted():
        constants['BLOCK_Q'] = blocks.INTERPRETED_QUERIES
    order = _tile_order(spatial_shapes, level_start_index, tokens) if cut.tiled else points
    strides = (0,) * 5 if gate is None else gate.expand(logits.shape).stride()
    tensors = [
        *inputs,
        value,
        spatial_shapes,
        level_start_index,
        order,
        points,
        # A kernel does not read the placeholders of missing tensors.
        points if reference_points is None else reference_points,
        logits,
        logits if gate is None else gate,
        *outputs,
    ]
    grid = (triton.cdiv(queries, constants['BLOCK_Q']), batch * heads)
    kernel = backward_kernel if backward else forward_kernel
    launch(kernel, grid, *tensors, tokens, queries, heads, *strides, **constants)


def _tile_order(spatial_shapes: Tensor, level_start_index: Tensor, tokens: int) -> Tensor:
    """Return the numbers of all tokens in the order in which the kernels' programs take them as queries."""
    import triton

    from .kernels import order_kernel

    order = torch.empty(tokens, dtype=torch.int32, device=spatial_shapes.device)
    grid = (triton.cdiv(tokens, ORDER_BLOCK),)
    levels = spatial_shapes.shape[0]
    launch(order_kernel, grid, spatial_shapes, level_start_index, order, tokens, LEVELS=levels, BLOCK=ORDER_BLOCK)
    return order


def _empty_outputs(
    value: Tensor, spatial_shapes: Tensor, level_start_index: Tensor, points: Tensor, logits: Tensor, *others: Any
) -> tuple[Tensor, Tensor]:
    """Allocate the results of :func:`_operator`, whose arguments this takes."""
    batch, queries, heads = logits.shape[:3]
    output = value.new_empty(batch, queries, heads * value.shape[3])
    return output, logits.new_empty(batch, queries, heads, dtype=torch.float32)


@operator('ms_deform_attn_fused', _empty_outputs)
def _operator(
    value: Tensor,
    spatial_shapes: Tensor,
    level_start_index: Tensor,
    points: Tensor,
    logits: Tensor,
    gate: Tensor | None,
    residual: bool,
    position: str,
    reference_points: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Run the forward kernel; return the output, and log2 of each softmax's sum, ``(B, Q, H)`` in float32."""
    outputs = _empty_outputs(value, spatial_shapes, level_start_index, points, logits)
    if logits.numel():
        _launch(
            False,
            (),
            outputs,
            value,
            spatial_shapes,
            level_start_index,
            points,
            logits,
            gate,
            residual,
            position,
            reference_points,
        )
    return outputs


def _empty_gradients(
    grad: Tensor,
    lse: Tensor,
    value: Tensor,
    spatial_shapes: Tensor,
    level_start_index: Tensor,
    points: Tensor,
    logits: Tensor,
    gate: Tensor | None,
    residual: bool,
    position: str,
    reference_points: Tensor | None,
    reference_needs_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Allocate the results of :func:`_gradients`; a tensor is empty if there is no such gradient."""
    of_reference = [0]
    if reference_needs_grad and reference_points is not None:
        of_reference = [*logits.shape[:4], reference_points.shape[-1]]
    return (
        torch.empty_like(value, dtype=torch.float32),
        torch.empty_like(points),
        points.new_empty(of_reference, dtype=torch.float32),
        torch.empty_like(logits),
        torch.empty_like(logits[:0] if gate is None else logits, dtype=torch.float32),
    )


@operator('ms_deform_attn_fused_backward', _empty_gradients)
def _gradients(
    grad: Tensor,
    lse: Tensor,
    value: Tensor,
    spatial_shapes: Tensor,
    level_start_index: Tensor,
    points: Tensor,
    logits: Tensor,
    gate: Tensor | None,
    residual: bool,
    position: str,
    reference_points: Tensor | None,
    reference_needs_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Run the backward kernel; return the gradients of values, points, reference, logits and gate.

    Those of the reference are by head, and those of the gate by logit, in float32; the caller sums them.
    """
    arguments = (
        value, spatial_shapes, level_start_index, points, logits, gate, residual, position, reference_points,
    )  # fmt: skip
    gradients = _empty_gradients(grad, lse, *arguments, reference_needs_grad)
    of_value = gradients[0]
    of_value.zero_()
    if logits.numel():
        _launch(True, (grad.contiguous(), lse), gradients, *arguments, GRAD_REFERENCE=reference_needs_grad)
    return gradients


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, residual, position, reference_points = inputs
    _, lse = output
    ctx.save_for_backward(*tensors, reference_points, lse)
    ctx.mark_non_differentiable(lse)
    ctx.residual = residual
    ctx.position = position


def _backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    *tensors, reference_points, lse = ctx.saved_tensors
    value = tensors[0]
    gate = tensors[5]
    reference_needs_grad = reference_points is not None and ctx.needs_input_grad[8]
    of_value, of_points, of_reference, of_logits, of_gate = _gradients(
        grad, lse, *tensors, ctx.residual, ctx.position, reference_points, reference_needs_grad
    )
    grad_gate = None if gate is None else of_gate.sum_to_size(gate.shape).to(gate.dtype)
    grad_reference = of_reference.sum(2).to(reference_points.dtype) if reference_needs_grad else None
    return of_value.to(value.dtype), None, None, of_points, of_logits, grad_gate, None, None, grad_reference


_operator.differentiate(_backward, _setup_context)
