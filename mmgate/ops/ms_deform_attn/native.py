"""CPU backend of deformable attention by mmgate's C++ kernel, as one custom operator with its gradient.

Like the Triton kernel it takes logits, gate and, if wanted, offsets as they are: neither locations nor weights are
written to memory. The loop is ``native/cpp/deformable.cpp``. 16-bit values are summed in float32; one float64 input
makes all of it float64.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mmgate.errors import UnsupportedCall

from .. import native as library
from ..custom_op import operator
from ..native import TYPES, fields

# Of the operators, whose schemas torch 2.4 does not read from annotations of lists.
ARGUMENTS = (
    'Tensor value, Tensor spatial_shapes, Tensor level_start_index, Tensor points, Tensor logits, Tensor? gate, '
    'bool residual, str position, Tensor? reference_points, int[]? num_points'
)
GRADIENTS = (
    f'(Tensor grad, {ARGUMENTS}, bool value_needs_grad, bool reference_needs_grad) '
    '-> (Tensor, Tensor, Tensor, Tensor, Tensor)'
)
MOST_NUMBERS = 2**31  # rows of an image's values and their borders, which the kernel counts in 32 bits


class Call(ctypes.Structure):
    """The C++ kernel's arguments (sizes, strides, addresses) as a ctypes structure.

    Its fields are those of the C struct ``Call`` in ``cpp/native.h``, in the same order.
    """

    _fields_ = [
        *fields(ctypes.c_int64, 'batch tokens heads dim queries levels samples columns residual post compute'),
        *fields(ctypes.c_int64, 'value_type points_type logits_type gate_type reference_type'),
        ('gate_stride', ctypes.c_int64 * 5),
        *fields(ctypes.c_int64, 'gate_summed threads widest'),
        ('points', ctypes.POINTER(ctypes.c_int64)),
        *fields(ctypes.c_void_p, 'value shapes starts at logits gate reference output grad'),
        *fields(ctypes.c_void_p, 'grad_value grad_at grad_logits grad_gate grad_reference'),
    ]


def why_not(value: Tensor) -> str | None:
    """Return the reason why this backend cannot run on ``value``, or None if it can."""
    if value.device.type != 'cpu':
        return f'it is for CPU tensors, value is on {value.device}'
    return library.missing()


def advice(value: Tensor) -> str | None:
    """Return a hint how the user gets this backend, such as to build the library, or None."""
    reason = why_not(value) if value.device.type == 'cpu' else None
    return reason and f"'native', several times faster, does not run: {reason}"


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

    ``points`` are sampling locations, or offsets if there are reference points.

    Raises:
        UnsupportedCall: Too many values an image for 32-bit rows, or a dtype that is none of float32, float64 and the
            two of 16 bits.
    """
    given = [x for x in (value, points, logits, gate, reference_points) if x is not None]
    other = [x.dtype for x in given if x.dtype not in TYPES]  # torch.compile of torch 2.7 does not take a next()
    if other:
        raise UnsupportedCall(f"ms_deform_attn: 'native' takes float32, float64, bfloat16 and float16, got {other[0]}.")
    if 2 * value.shape[1] >= MOST_NUMBERS:
        raise UnsupportedCall(f"ms_deform_attn: 'native' takes up to 2^30 tokens an image, got {value.shape[1]}.")
    double = any(x.dtype == torch.float64 for x in given)
    output = _operator(
        (value.double() if double else value).contiguous(),
        spatial_shapes.long().contiguous(),
        level_start_index.long().contiguous(),
        points.contiguous(),
        logits.contiguous(),
        gate,
        residual,
        position,
        None if reference_points is None else reference_points.contiguous(),
        None if num_points is None else list(num_points),
    )
    return output.to(value.dtype)


def _described(
    value: Tensor,
    spatial_shapes: Tensor,
    level_start_index: Tensor,
    points: Tensor,
    logits: Tensor,
    gate: Tensor | None,
    residual: bool,
    position: str,
    reference_points: Tensor | None,
    num_points: Sequence[int] | None,
) -> Call:
    """Fill in the C++ kernel's arguments for these tensors, except for the addresses of results.

    It holds addresses, and keeps no tensor alive.
    """
    counts = [logits.shape[4]] * logits.shape[3] if num_points is None else num_points
    call = Call()
    call.batch, call.tokens, call.heads, call.dim = value.shape
    call.queries = logits.shape[1]
    call.levels = len(counts)
    call.samples = sum(counts)
    call.points = (ctypes.c_int64 * len(counts))(*counts)
    call.residual = residual
    call.post = position == 'post_softmax'
    call.compute = TYPES[_compute(value)]
    call.threads = torch.get_num_threads()
    call.widest = library.WIDEST
    call.value = value.data_ptr()
    call.value_type = TYPES[value.dtype]
    call.shapes = spatial_shapes.data_ptr()
    call.starts = level_start_index.data_ptr()
    call.at = points.data_ptr()
    call.points_type = TYPES[points.dtype]
    call.logits = logits.data_ptr()
    call.logits_type = TYPES[logits.dtype]
    if gate is not None:
        call.gate = gate.data_ptr()
        call.gate_type = TYPES[gate.dtype]
        if num_points is None:
            sizes, (*others, of_level, of_point) = _axes(gate, 5)
            # The kernel counts samples through all levels, and so takes the step of a sample for each point.
            call.gate_stride[:] = (*others, of_level - counts[0] * of_point, of_point)
            call.gate_summed = sizes[4] == 1
        else:
            _, (*others, of_sample) = _axes(gate, 4)
            call.gate_stride[:] = (*others, 0, of_sample)
    if reference_points is not None:
        call.columns = reference_points.shape[-1]
        call.reference = reference_points.data_ptr()
        call.reference_type = TYPES[reference_points.dtype]
    return call


def _run(call: Call, backward: bool) -> None:
    """Run the C++ kernel, forward or backward, on arguments that have the addresses of the results."""
    if library.load()[0].mmgate_ms_deform_attn(ctypes.byref(call), int(backward), int(library.OWN_THREADS)):
        raise MemoryError('ms_deform_attn: there is not enough memory for a copy of the values of a head.')


def _compute(value: Tensor) -> torch.dtype:
    """Return the dtype in which the kernel sums: float64 for float64 values, else float32."""
    return torch.float64 if value.dtype == torch.float64 else torch.float32


def _axes(gate: Tensor, axes: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return a gate's sizes and strides for so many axes, with the stride 0 where it broadcasts.

    Leading axes of the gate may be missing.
    """
    missing = axes - gate.dim()
    sizes = (1,) * missing + gate.shape
    strides = (0,) * missing + gate.stride()
    return sizes, tuple(0 if size == 1 else stride for size, stride in zip(sizes, strides, strict=True))


def _empty_output(
    value: Tensor, spatial_shapes: Tensor, level_start_index: Tensor, points: Tensor, logits: Tensor, *others: Any
) -> Tensor:
    """Allocate the output of :func:`_operator`, whose arguments this takes."""
    batch, queries, heads = logits.shape[:3]
    return value.new_empty(batch, queries, heads * value.shape[3])


@operator('ms_deform_attn_native', _empty_output, f'({ARGUMENTS}=None) -> Tensor')
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
    num_points: Sequence[int] | None = None,
) -> Tensor:
    """Run the forward pass of the C++ kernel and return the output ``(B, Q, H * D)``."""
    output = _empty_output(value, spatial_shapes, level_start_index, points, logits)
    call = _described(
        value, spatial_shapes, level_start_index, points, logits, gate, residual, position, reference_points, num_points
    )
    call.output = output.data_ptr()
    _run(call, backward=False)
    return output


def _empty_gradients(
    grad: Tensor,
    value: Tensor,
    spatial_shapes: Tensor,
    level_start_index: Tensor,
    points: Tensor,
    logits: Tensor,
    gate: Tensor | None,
    residual: bool,
    position: str,
    reference_points: Tensor | None,
    num_points: Sequence[int] | None,
    value_needs_grad: bool,
    reference_needs_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Allocate the gradients of values (as zeros), points, logits, gate and reference points.

    Memory that is not needed is empty. The gate's gradient is a sample's, or summed over a level's points if the gate
    has one number for them; that of the reference points is a head's.
    """
    compute = _compute(value)
    of_value = torch.zeros_like(value if value_needs_grad else value[:0], dtype=compute)
    of_gate = [0]
    if gate is not None:
        of_gate = [*logits.shape]
        if num_points is None:
            of_gate[4] = _axes(gate, 5)[0][4]
    of_reference = [0]
    if reference_needs_grad and reference_points is not None:
        of_reference = [*logits.shape[:3], *reference_points.shape[2:]]
    return (
        of_value,
        torch.empty_like(points),
        torch.empty_like(logits),
        logits.new_empty(of_gate, dtype=compute),
        logits.new_empty(of_reference, dtype=compute),
    )


@operator('ms_deform_attn_native_backward', _empty_gradients, GRADIENTS)
def _gradients(
    grad: Tensor,
    value: Tensor,
    spatial_shapes: Tensor,
    level_start_index: Tensor,
    points: Tensor,
    logits: Tensor,
    gate: Tensor | None,
    residual: bool,
    position: str,
    reference_points: Tensor | None,
    num_points: Sequence[int] | None,
    value_needs_grad: bool,
    reference_needs_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Run the backward pass; return the gradients of values, points, logits, gate and reference points.

    Their shapes are those of :func:`_empty_gradients`.
    """
    arguments = (
        value, spatial_shapes, level_start_index, points, logits,
        gate, residual, position, reference_points, num_points,
    )  # fmt: skip
    gradients = _empty_gradients(grad, *arguments, value_needs_grad, reference_needs_grad)
    of_value, of_points, of_logits, of_gate, of_reference = gradients
    grad = grad.contiguous()
    call = _described(*arguments)
    call.grad = grad.data_ptr()
    call.grad_at = of_points.data_ptr()
    call.grad_logits = of_logits.data_ptr()
    if value_needs_grad:
        call.grad_value = of_value.data_ptr()
    if gate is not None:
        call.grad_gate = of_gate.data_ptr()
    if reference_needs_grad:
        call.grad_reference = of_reference.data_ptr()
    _run(call, backward=True)
    return gradients


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, residual, position, reference_points, num_points = inputs
    ctx.save_for_backward(*tensors, reference_points)
    ctx.residual = residual
    ctx.position = position
    ctx.num_points = num_points


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, reference_points = ctx.saved_tensors
    value = tensors[0]
    gate = tensors[5]
    value_needs_grad = ctx.needs_input_grad[0]
    reference_needs_grad = reference_points is not None and ctx.needs_input_grad[8]
    of_value, of_points, of_logits, of_gate, of_reference = _gradients(
        grad,
        *tensors,
        ctx.residual,
        ctx.position,
        reference_points,
        ctx.num_points,
        value_needs_grad,
        reference_needs_grad,
    )
    grad_value = of_value.to(value.dtype) if value_needs_grad else None
    grad_gate = None if gate is None else of_gate.sum_to_size(gate.shape).to(gate.dtype)
    grad_reference = of_reference.sum(2).to(reference_points.dtype) if reference_needs_grad else None
    return grad_value, None, None, of_points, of_logits, grad_gate, None, None, grad_reference, None


_operator.differentiate(_backward, _setup_context)
