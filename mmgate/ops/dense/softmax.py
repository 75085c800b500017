r"""Softmax of gated logits for a chunk of queries, and its gradients, by one C++ loop if that is compiled.

With the logits S, the gate's factor f and a bias, over the columns of a row:

    P = softmax(f S + bias)
    dL = P (dP - delta);  dS = f dL;  df = sum over the heads that share f of dL S

By torch each step goes over the chunk again. The loop, ``native/cpp/softmax.cpp``, goes over each row once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from .. import native
from ..native import TYPES, fields


class GatedRows(ctypes.Structure):
    """Arguments of the C++ loop (sizes, strides, addresses) as a ctypes structure.

    Its fields are those of the C struct ``GatedRows`` in ``native/cpp/softmax.cpp``, in the same order.
    """

    _fields_ = [
        *fields(ctypes.c_int64, 'batch heads gate_heads rows columns compute'),
        ('bias_stride', ctypes.c_int64 * 4),
        *fields(ctypes.c_int64, 'threads is_raw'),
        ('scalars', ctypes.c_double * 4),
        *fields(ctypes.c_void_p, 'logits factor bias weights grad delta grad_factor'),
    ]


def gated_softmax(
    logits: Tensor,
    factor: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    scalars: Sequence[float] | None = None,
) -> Tensor:
    """Compute ``softmax(logits * factor + bias)`` over the last axis, write it into ``out`` and return it.

    Args:
        logits: ``(B, H, N, M)``, contiguous, float32 or float64.
        factor: ``(B, H|1, N, M)`` in the dtype of the logits; None leaves the logits as they are.
        bias: Broadcasts to ``(B, H, N, M)``, any dtype; None for none.
        out: A contiguous tensor like ``logits``, or ``logits`` itself.
        scalars: The numbers a, b, c and e of a gate where :func:`forms_factor` is true. Then ``factor`` holds raw gates
            r, contiguous, and ``1 + tanh((a r + b) (c r + e))`` is written over them first.
    """
    if _is_native(logits, factor):
        call = _described(logits, factor)
        call.weights = out.data_ptr()
        if scalars is not None:
            call.is_raw = 1
            call.scalars[:] = scalars
        if bias is not None:
            bias = bias.to(logits.dtype).expand(logits.shape)
            call.bias = bias.data_ptr()
            call.bias_stride[:] = bias.stride()
        _run(call, backward=False)
        return out
    if factor is None:
        out.copy_(logits)
    else:
        torch.mul(logits, factor, out=out)
    if bias is not None:
        out.add_(bias)
    out.sub_(out.amax(-1, keepdim=True)).exp_()
    return out.div_(out.sum(-1, keepdim=True))


def gated_softmax_backward(
    logits: Tensor, factor: Tensor, weights: Tensor, grad_weights: Tensor, delta: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the logits and of the gate's factor, given that of the attention weights.

    Args:
        logits: ``(B, H, N, M)`` before the gate, contiguous. Their values may be lost.
        factor: ``(B, H|1, N, M)``.
        weights: What :func:`gated_softmax` returned, contiguous.
        grad_weights: Their gradient, contiguous. The gradient of the logits is written over it.
        delta: Sum of the weights times their gradient over the columns, ``(B, H, N, 1)``, contiguous.
    """
    if _is_native(logits, factor):
        grad_factor = torch.empty_like(factor, memory_format=torch.contiguous_format)
        call = _described(logits, factor)
        call.weights = weights.data_ptr()
        call.grad = grad_weights.data_ptr()
        call.delta = delta.data_ptr()
        call.grad_factor = grad_factor.data_ptr()
        _run(call, backward=True)
        return grad_weights, grad_factor
    grad_logits = grad_weights.sub_(delta).mul_(weights)
    of_factor = logits.mul_(grad_logits)
    return grad_logits.mul_(factor), sum_heads(of_factor, factor)


def sum_heads(grad: Tensor, factor: Tensor) -> Tensor:
    """Sum the gradient of the gate's factor over the heads if all heads share one gate."""
    return grad.sum(1, keepdim=True) if factor.shape[1] == 1 else grad


def forms_factor(query: Tensor) -> bool:
    """Return True if :func:`gated_softmax` itself computes the logits' factor from raw gates, for these queries."""
    return query.dtype in (torch.float32, torch.float64) and _is_native(query, None)


def _is_native(logits: Tensor, factor: Tensor | None) -> bool:
    """Return True if the C++ loop can run on a chunk: real CPU tensors, no fake ones, of float32 or float64."""
    if type(logits) is not Tensor or logits.device.type != 'cpu' or not logits.numel():
        return False
    if factor is not None and factor.dtype != logits.dtype:
        return False
    return native.missing() is None


def _described(logits: Tensor, factor: Tensor | None) -> GatedRows:
    """Fill in the C++ loop's arguments for a chunk's tensors.

    It holds addresses, and keeps no tensor alive.
    """
    call = GatedRows()
    call.batch, call.heads, call.rows, call.columns = logits.shape
    call.gate_heads = 1 if factor is None else factor.shape[1]
    call.compute = TYPES[logits.dtype]
    call.threads = torch.get_num_threads()
    call.logits = logits.data_ptr()
    call.factor = None if factor is None else factor.data_ptr()
    return call


def _run(call: GatedRows, *, backward: bool) -> None:
    library, _ = native.load()
    library.mmgate_gated_softmax(ctypes.byref(call), int(backward), int(native.OWN_THREADS))
