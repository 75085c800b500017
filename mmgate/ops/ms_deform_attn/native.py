"""Multi-scale deformable attention by mmgate's own C++ loop on the CPU, as one operator with its gradient.

As the Triton kernel it takes logits, gate and, if wanted, offsets as they are: neither locations nor weights are
written to memory. The loop is ``cpp/kernel.cpp``, compiled by ``python -m mmgate.doctor --build`` and loaded by ctypes,
which needs no header of torch's. 16-bit values are summed in float32; one float64 input makes all be float64.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from ..library import operator
from . import build
from .weights import Sampling

MOST_NUMBERS = 2**31  # rows of an image's values and their borders, which the kernel counts in 32 bits
TYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
COMMAND = 'python -m mmgate.doctor --build'
ARGUMENTS = (  # Sampling's fields
    'Tensor value, Tensor spatial_shapes, Tensor level_start_index, Tensor points, Tensor logits, Tensor? gate, '
    'bool residual, str position, Tensor? reference_points'
)
WIDEST = 2  # of the sets of instructions: 0 the baseline, 1 x86-64-v3, 2 x86-64-v4; a test lowers it
OWN_THREADS = False  # instead of torch's; for a thread sanitizer, which does not know OpenMP's


def _fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class Call(ctypes.Structure):
    """``Call`` of ``cpp/native.h``."""

    _fields_ = [
        *_fields(ctypes.c_int64, 'batch tokens heads dim queries levels points columns residual post compute'),
        *_fields(ctypes.c_int64, 'value_type points_type logits_type gate_type reference_type'),
        ('gate_stride', ctypes.c_int64 * 5),
        *_fields(ctypes.c_int64, 'gate_summed threads widest'),
        *_fields(ctypes.c_void_p, 'value shapes starts at logits gate reference output grad'),
        *_fields(ctypes.c_void_p, 'grad_value grad_at grad_logits grad_gate grad_reference'),
    ]


@functools.cache
def loaded() -> tuple[Any, str | None]:
    """Return the library's function, or why there is none."""
    path = build.library()
    if not path.is_file():
        return None, f'it is not compiled yet; type once: {COMMAND}'
    try:
        kernel = ctypes.CDLL(str(path))
        kernel.mmgate_sources.restype = ctypes.c_char_p
        same = kernel.mmgate_sources().decode() == build.sources()
    except (OSError, AttributeError) as error:
        return None, f'{path.name} does not load ({error}); type: {COMMAND}'
    return kernel.mmgate_ms_deform_attn, None if same else f'it was compiled from other sources; type: {COMMAND}'


@torch.compiler.assume_constant_result
def _missing() -> str | None:
    """Return why there is no library; torch.compile asks once, while it traces."""
    return loaded()[1]


def why_not(value: Tensor) -> str | None:
    """Return why this backend cannot run on ``value``, or None."""
    if value.device.type != 'cpu':
        return f'it is for CPU tensors, value is on {value.device}'
    return _missing()


def advice(value: Tensor) -> str | None:
    """Return what a user can do to have this backend, or None."""
    reason = why_not(value) if value.device.type == 'cpu' else None
    return reason and f"'native', several times faster, does not run: {reason}"


def attend(*arguments: Any) -> Tensor:
    """Attend from logits; the arguments are those of :class:`Sampling`.

    Raises:
        ValueError: Too many values an image for 32-bit rows, or a dtype that is none of float32, float64 and the two of
            16 bits.
    """
    call = Sampling(*arguments)
    given = [x for x in (call.value, call.points, call.logits, call.gate, call.reference_points) if x is not None]
    other = next((x.dtype for x in given if x.dtype not in TYPES), None)
    if other is not None:
        raise ValueError(f"ms_deform_attn: 'native' takes float32, float64, bfloat16 and float16, got {other}.")
    if 2 * call.value.shape[1] >= MOST_NUMBERS:
        raise ValueError(f"ms_deform_attn: 'native' takes up to 2^30 tokens an image, got {call.value.shape[1]}.")
    value = call.value.double() if any(x.dtype == torch.float64 for x in given) else call.value
    value, points, logits = (x.contiguous() for x in (value, call.points, call.logits))
    shapes, starts = (x.long().contiguous() for x in (call.spatial_shapes, call.level_start_index))
    reference = None if call.reference_points is None else call.reference_points.contiguous()
    output = _fused(value, shapes, starts, points, logits, call.gate, call.residual, call.position, reference)
    return output.to(call.value.dtype)


def _pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _run(call: Sampling, output: Tensor | None, grad: Tensor | None = None, **grads: Tensor | None) -> None:
    """Run a pass; its results are written into ``output``, or into ``grads``."""
    value, shapes, starts, points, logits, gate, residual, position, reference = call
    given = Call()
    given.batch, given.tokens, given.heads, given.dim = value.shape
    given.queries, given.levels, given.points = logits.shape[1], logits.shape[3], logits.shape[4]
    given.columns = 0 if reference is None else reference.shape[-1]
    given.residual, given.post = residual, position == 'post_softmax'
    given.compute = TYPES[_compute(value)]
    given.value_type, given.points_type, given.logits_type = (TYPES[x.dtype] for x in (value, points, logits))
    if gate is not None:
        given.gate, given.gate_type = gate.data_ptr(), TYPES[gate.dtype]
        sizes, given.gate_stride[:] = _axes(gate)
        given.gate_summed = sizes[4] == 1
    if reference is not None:
        given.reference, given.reference_type = reference.data_ptr(), TYPES[reference.dtype]
    given.threads, given.widest = torch.get_num_threads(), WIDEST
    given.value, given.shapes, given.starts = value.data_ptr(), shapes.data_ptr(), starts.data_ptr()
    given.at, given.logits = points.data_ptr(), logits.data_ptr()
    given.output, given.grad = _pointer(output), _pointer(grad)
    for name, x in grads.items():
        setattr(given, name, _pointer(x))
    if loaded()[0](ctypes.byref(given), int(grad is not None), int(OWN_THREADS)):
        raise MemoryError('ms_deform_attn: there is not enough memory for a copy of the values of a head.')


def _compute(value: Tensor) -> torch.dtype:
    return torch.float64 if value.dtype == torch.float64 else torch.float32


def _axes(gate: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return sizes and strides of a gate as (B, Q, H, L, P), of which leading axes may be missing; 0 to broadcast."""
    sizes, strides = (1,) * (5 - gate.dim()) + gate.shape, (0,) * (5 - gate.dim()) + gate.stride()
    return sizes, tuple(0 if size == 1 else stride for size, stride in zip(sizes, strides, strict=True))


def _output(*arguments: Any) -> Tensor:
    call = Sampling(*arguments)
    batch, queries, heads = call.logits.shape[:3]
    return call.value.new_empty(batch, queries, heads * call.value.shape[3])


@operator('ms_deform_attn_native', _output, f'({ARGUMENTS}) -> Tensor')
def _fused(*arguments: Any) -> Tensor:
    """Return the output."""
    call = Sampling(*arguments)
    output = _output(*call)
    _run(call, output)
    return output


def _gradients(grad: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    *inputs, of_value, of_reference = arguments
    call = Sampling(*inputs)
    compute, logits = _compute(call.value), call.logits
    of_gate = [0]
    if call.gate is not None:  # summed over a level's points, where the gate has one number for them
        of_gate = [*logits.shape[:4], _axes(call.gate)[0][4]]
    columns = call.reference_points.shape[-1:] if of_reference and call.reference_points is not None else None
    return (
        torch.zeros_like(call.value, dtype=compute) if of_value else call.value.new_empty([0], dtype=compute),
        torch.empty_like(call.points),
        torch.empty_like(logits),
        logits.new_empty(of_gate, dtype=compute),
        logits.new_empty([0] if columns is None else [*logits.shape[:4], *columns], dtype=compute),
    )


@operator(
    'ms_deform_attn_native_backward',
    _gradients,
    f'(Tensor grad, {ARGUMENTS}, bool of_value, bool of_reference) -> (Tensor, Tensor, Tensor, Tensor, Tensor)',
)
def _fused_backward(grad: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """Return the gradients of values, points, logits, gate (a sample's or a level's) and reference (a head's)."""
    *inputs, of_value, of_reference = arguments
    call = Sampling(*inputs)
    grads = _gradients(grad, *arguments)
    names = ('grad_value', 'grad_at', 'grad_logits', 'grad_gate', 'grad_reference')
    wanted = (of_value, True, True, call.gate is not None, of_reference)
    given = {name: x for name, x, is_wanted in zip(names, grads, wanted, strict=True) if is_wanted}
    _run(call, None, grad.contiguous(), **given)
    return grads


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.residual, ctx.position, reference = inputs
    ctx.save_for_backward(*tensors, reference)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, reference = ctx.saved_tensors
    call = Sampling._make((*tensors, ctx.residual, ctx.position, reference))
    wanted = ctx.needs_input_grad[0], reference is not None and ctx.needs_input_grad[8]
    of_value, of_points, of_logits, of_gate, of_reference = _fused_backward(grad, *call, *wanted)
    value = of_value.to(call.value.dtype) if wanted[0] else None
    gate = None if call.gate is None else of_gate.sum_to_size(call.gate.shape).to(call.gate.dtype)
    references = of_reference.sum(2).to(reference.dtype) if wanted[1] else None
    return value, None, None, of_points, of_logits, gate, None, None, references


_fused.differentiate(_backward, _setup_context)
