"""CPU backend of deformable attention by mmgate's C++ kernel, as one custom operator with its gradient.

Like the Triton kernel it takes logits, gate and, if wanted, offsets as they are: neither locations nor weights are
written to memory. The loop is ``native/cpp/deformable.cpp``. 16-bit values are summed in float32; one float64 input
makes all of it float64.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from mmgate.errors import UnsupportedCall

from .. import native as library
from ..backend import arguments_of, operator, save_fields, saved_fields, tensors_of
from ..native import FLOATING, TYPES, Numbers, fields, fields_of, numbers
from .samples import POSITIONS, Samples, gradients_of_fields, in_memory

MOST_NUMBERS = 2**31  # rows of an image's values and their borders, which the kernel counts in 32 bits


class Call(ctypes.Structure):
    """The C++ kernel's arguments: the fields of :class:`.samples.Samples`, their sizes, and the results.

    Its fields are those of the C struct ``Call`` in ``native/cpp/deformable.cpp``, in the same order.
    """

    _fields_ = [
        *fields_of(Samples),
        *fields(ctypes.c_int64, 'batch tokens heads dim queries levels samples columns'),
        ('gate_stride', ctypes.c_int64 * 5),
        *fields(ctypes.c_int64, 'gate_summed compute threads'),
        *fields(Numbers, 'output grad grad_value grad_points grad_logits grad_gate grad_reference_points'),
    ]


def attend(samples: Samples) -> Tensor:
    """Compute deformable attention by the C++ kernel: ``(B, Q, H * D)``.

    Raises:
        UnsupportedCall: Too many values an image for 32-bit rows, or a dtype that is none of float32, float64 and the
            two of 16 bits.
    """
    value = samples.value
    given = [
        x for x in (value, samples.points, samples.logits, samples.gate, samples.reference_points) if x is not None
    ]
    other = [x.dtype for x in given if x.dtype not in FLOATING]  # torch.compile of torch 2.7 does not take a next()
    if other:
        raise UnsupportedCall(f"ms_deform_attn: 'native' takes float32, float64, bfloat16 and float16, got {other[0]}.")
    if 2 * value.shape[1] >= MOST_NUMBERS:
        raise UnsupportedCall(f"ms_deform_attn: 'native' takes up to 2^30 tokens an image, got {value.shape[1]}.")
    double = any(x.dtype == torch.float64 for x in given)
    output = _operator(*in_memory(samples, double=double))
    return output.to(value.dtype)


def _described(samples: Samples) -> Call:
    """Fill in the C++ kernel's arguments, except for the results.

    It holds addresses, and keeps no tensor alive.
    """
    logits = samples.logits
    gate = samples.gate
    counts = [logits.shape[4]] * logits.shape[3] if samples.num_points is None else samples.num_points
    call = Call(**{name: numbers(getattr(samples, name)) for name in tensors_of(Samples)})
    call.residual = samples.residual
    call.position = POSITIONS.index(samples.position)
    call.num_points = (ctypes.c_int64 * len(counts))(*counts)
    call.batch, call.tokens, call.heads, call.dim = samples.value.shape
    call.queries = logits.shape[1]
    call.levels = len(counts)
    call.samples = sum(counts)
    if samples.reference_points is not None:
        call.columns = samples.reference_points.shape[-1]
    if gate is not None and samples.num_points is None:
        sizes, (*others, of_level, of_point) = _axes(gate, 5)
        # The kernel counts samples through all levels, and so takes the step of a sample for each point.
        call.gate_stride[:] = (*others, of_level - counts[0] * of_point, of_point)
        call.gate_summed = sizes[4] == 1
    elif gate is not None:
        _, (*others, of_sample) = _axes(gate, 4)
        call.gate_stride[:] = (*others, 0, of_sample)
    call.compute = TYPES[_compute(samples.value)]
    call.threads = torch.get_num_threads()
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


def _empty_output(*fields: Any) -> Tensor:
    """Allocate the output of :func:`_operator`, whose arguments this takes."""
    samples = Samples(*fields)
    batch, queries, heads = samples.logits.shape[:3]
    return samples.value.new_empty(batch, queries, heads * samples.value.shape[3])


@operator('ms_deform_attn_native', _empty_output, f'({arguments_of(Samples)}) -> Tensor')
def _operator(*fields: Any) -> Tensor:
    """Run the forward pass of the C++ kernel on the fields of Samples; return the output ``(B, Q, H * D)``."""
    output = _empty_output(*fields)
    call = _described(Samples(*fields))
    call.output = numbers(output)
    _run(call, backward=False)
    return output


def _empty_gradients(
    grad: Tensor, value_needs_grad: bool, reference_needs_grad: bool, *fields: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Allocate the gradients of values (as zeros), points, logits, gate and reference points.

    Memory that is not needed is empty. The gate's gradient is a sample's, or summed over a level's points if the gate
    has one number for them; that of the reference points is a head's.
    """
    samples = Samples(*fields)
    value = samples.value
    logits = samples.logits
    compute = _compute(value)
    of_value = torch.zeros_like(value if value_needs_grad else value[:0], dtype=compute)
    of_gate = [0]
    if samples.gate is not None:
        of_gate = [*logits.shape]
        if samples.num_points is None:
            of_gate[4] = _axes(samples.gate, 5)[0][4]
    of_reference = [0]
    if reference_needs_grad and samples.reference_points is not None:
        of_reference = [*logits.shape[:3], *samples.reference_points.shape[2:]]
    return (
        of_value,
        torch.empty_like(samples.points),
        torch.empty_like(logits),
        logits.new_empty(of_gate, dtype=compute),
        logits.new_empty(of_reference, dtype=compute),
    )


@operator(
    'ms_deform_attn_native_backward',
    _empty_gradients,
    f'(Tensor grad, bool value_needs_grad, bool reference_needs_grad, {arguments_of(Samples)}) '
    '-> (Tensor, Tensor, Tensor, Tensor, Tensor)',
)
def _gradients(
    grad: Tensor, value_needs_grad: bool, reference_needs_grad: bool, *fields: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Run the backward pass; return the gradients of values, points, logits, gate and reference points.

    Their shapes are those of :func:`_empty_gradients`.
    """
    gradients = _empty_gradients(grad, value_needs_grad, reference_needs_grad, *fields)
    of_value, of_points, of_logits, of_gate, of_reference = gradients
    samples = Samples(*fields)
    grad = grad.contiguous()
    call = _described(samples)
    call.grad = numbers(grad)
    call.grad_points = numbers(of_points)
    call.grad_logits = numbers(of_logits)
    if value_needs_grad:
        call.grad_value = numbers(of_value)
    if samples.gate is not None:
        call.grad_gate = numbers(of_gate)
    if reference_needs_grad:
        call.grad_reference_points = numbers(of_reference)
    _run(call, backward=True)
    return gradients


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    save_fields(ctx, Samples(*inputs))


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    samples, _ = saved_fields(ctx, Samples)
    needs_grad = Samples(*ctx.needs_input_grad)
    value_needs_grad = bool(needs_grad.value)
    reference_needs_grad = bool(needs_grad.reference_points)
    of_value, of_points, of_logits, of_gate, of_reference = _gradients(
        grad, value_needs_grad, reference_needs_grad, *samples
    )
    return gradients_of_fields(
        samples,
        of_value=of_value if value_needs_grad else None,
        of_points=of_points,
        of_logits=of_logits,
        of_gate=of_gate,
        of_reference=of_reference if reference_needs_grad else None,
    )


_operator.differentiate(_backward, _setup_context)
