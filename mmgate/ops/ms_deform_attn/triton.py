"""Multi-scale deformable attention by Triton kernels, as one operator with its gradient.

Unlike the other backends it takes logits, gate and, if wanted, offsets as they are: neither locations nor weights are
written to memory. On the CPU it runs only in Triton's interpreter (``TRITON_INTERPRET=1``), for tests.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import triton_backend
from ..library import operator
from ..triton_backend import interpreted, launch
from . import blocks
from .blocks import cut_for
from .weights import Sampling

MOST_NUMBERS = 2**31  # an image, for 32-bit offsets
MOST_HEADS = 65_535  # the second axis of a grid
ORDER_BLOCK = 512
# Sampling's fields
ARGUMENTS = (
    'Tensor value, Tensor spatial_shapes, Tensor level_start_index, Tensor points, Tensor logits, Tensor? gate, '
    'bool residual, str position, Tensor? reference_points'
)


def why_not(value: Tensor) -> str | None:
    """Return why this backend cannot run on ``value``, or None."""
    if torch.are_deterministic_algorithms_enabled():
        return 'it adds up the gradients of the values in no fixed order, and torch.use_deterministic_algorithms is on'
    return triton_backend.why_not(value)


def attend(*arguments: Any) -> Tensor:
    """Attend from logits; the arguments are those of :class:`Sampling`.

    Raises:
        ValueError: Too many values, points or outputs an image for 32-bit offsets, or too many heads for a grid.
    """
    call = Sampling(*arguments)
    batch, _, heads, dim = call.value.shape
    sizes = dict(values=call.value.shape[1:].numel(), points=call.points.shape[1:].numel())
    sizes['outputs'] = call.points.shape[1] * heads * dim
    if call.reference_points is not None:  # whose gradient is a head's
        sizes['reference points'] = call.logits.shape[1:4].numel() * call.reference_points.shape[-1]
    takes = "ms_deform_attn: 'triton' takes"
    for name, size in sizes.items():
        if size >= MOST_NUMBERS:
            raise ValueError(f"{takes} fewer than 2^31 numbers an image, the {name} are {size}; use 'mmcv' or 'torch'.")
    if batch * heads > MOST_HEADS:
        raise ValueError(f'{takes} up to {MOST_HEADS} heads of all images, got {batch} x {heads}; use a smaller batch.')
    gate = call.gate
    if gate is not None:  # read where it lies, unless 32-bit offsets do not reach so far
        strides = gate.expand(call.logits.shape).stride()
        far = sum((n - 1) * stride for n, stride in zip(call.logits.shape[1:], strides[1:], strict=True))
        gate = gate.contiguous() if far >= MOST_NUMBERS else gate
    value, shapes, starts, points, logits = (x.contiguous() for x in call[:5])
    reference = None if call.reference_points is None else call.reference_points.contiguous()
    return _fused(value, shapes, starts, points, logits, gate, call.residual, call.position, reference)[0]


def _launch(backward: bool, call: Sampling, before: list[Tensor], after: list[Tensor], **switches: bool) -> None:
    """Launch a kernel on ``call``, and on what its pass has before and after it."""
    import triton

    from .backward_kernel import backward_kernel
    from .kernels import forward_kernel

    value, shapes, starts, points, logits, gate, residual, position, reference = call
    batch, tokens, heads, dim = value.shape
    _, queries, _, levels, count = logits.shape
    cut = cut_for(value, logits, backward)
    strides = (0,) * 5 if gate is None else gate.expand(logits.shape).stride()
    constants: dict[str, Any] = dict(LEVELS=levels, POINTS=count, PADDED=triton.next_power_of_2(levels * count), D=dim)
    constants |= dict(GATED=gate is not None, RESIDUAL=residual, POST=position == 'post_softmax', TILED=cut.tiled)
    constants |= dict(REFERENCE=0 if reference is None else reference.shape[-1], **switches, **cut.constants(dim))
    if interpreted():
        constants['BLOCK_Q'] = blocks.INTERPRETED_QUERIES
    order = _tile_order(shapes, starts, tokens) if cut.tiled else points
    # what is missing is not read
    reference, gate = points if reference is None else reference, logits if gate is None else gate
    tensors = [*before, value, shapes, starts, order, points, reference, logits, gate, *after]
    grid = triton.cdiv(queries, constants['BLOCK_Q']), batch * heads
    kernel = backward_kernel if backward else forward_kernel
    launch(kernel, grid, *tensors, tokens, queries, heads, *strides, **constants)


def _tile_order(shapes: Tensor, starts: Tensor, tokens: int) -> Tensor:
    """Return all tokens in the order in which programs take them as queries."""
    import triton

    from .kernels import order_kernel

    order = torch.empty(tokens, dtype=torch.int32, device=shapes.device)
    grid = (triton.cdiv(tokens, ORDER_BLOCK),)
    launch(order_kernel, grid, shapes, starts, order, tokens, LEVELS=shapes.shape[0], BLOCK=ORDER_BLOCK)
    return order


def _outputs(*arguments: Any) -> tuple[Tensor, Tensor]:
    call = Sampling(*arguments)
    batch, queries, heads = call.logits.shape[:3]
    output = call.value.new_empty(batch, queries, heads * call.value.shape[3])
    return output, call.logits.new_empty(batch, queries, heads, dtype=torch.float32)


@operator('ms_deform_attn_fused', _outputs, f'({ARGUMENTS}) -> (Tensor, Tensor)')
def _fused(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Return the output, and log2 of every softmax's sum, ``(B, Q, H)`` float32."""
    call = Sampling(*arguments)
    output, lse = _outputs(*call)
    if call.logits.numel():
        _launch(False, call, [], [output, lse])
    return output, lse


def _gradients(grad: Tensor, lse: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    *inputs, grad_reference = arguments
    call = Sampling(*inputs)
    columns = call.reference_points.shape[-1:] if grad_reference and call.reference_points is not None else None
    return (
        torch.empty_like(call.value, dtype=torch.float32),
        torch.empty_like(call.points),
        call.points.new_empty([0] if columns is None else [*call.logits.shape[:4], *columns], dtype=torch.float32),
        torch.empty_like(call.logits),
        torch.empty_like(call.logits if call.gate is not None else call.logits[:0], dtype=torch.float32),
    )


@operator(
    'ms_deform_attn_fused_backward',
    _gradients,
    f'(Tensor grad, Tensor lse, {ARGUMENTS}, bool grad_reference) -> (Tensor, Tensor, Tensor, Tensor, Tensor)',
)
def _fused_backward(grad: Tensor, lse: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """Return the gradients of values, points, reference (a head's, float32), logits and gate (a logit's, float32)."""
    *inputs, grad_reference = arguments
    call = Sampling(*inputs)
    grads = _gradients(grad, lse, *arguments)
    grads[0].zero_()
    if not call.logits.numel():
        return grads
    _launch(True, call, [grad.contiguous(), lse], list(grads), GRAD_REFERENCE=grad_reference)
    return grads


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.residual, ctx.position, reference = inputs
    ctx.save_for_backward(*tensors, reference, output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    *tensors, reference, lse = ctx.saved_tensors
    call = Sampling._make((*tensors, ctx.residual, ctx.position, reference))
    of_reference = reference is not None and ctx.needs_input_grad[8]
    of_value, of_points, of_references, of_logits, of_gate = _fused_backward(grad, lse, *call, of_reference)
    gate = None if call.gate is None else of_gate.sum_to_size(call.gate.shape).to(call.gate.dtype)
    references = of_references.sum(2).to(reference.dtype) if of_reference else None
    return of_value.to(call.value.dtype), None, None, of_points, of_logits, gate, None, None, references


_fused.differentiate(_backward, _setup_context)
