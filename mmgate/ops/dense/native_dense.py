"""CPU backend of PLuG attention: rows in chunks, as in ``chunked.py``, whose softmax is one C++ loop.

The loop is ``native/cpp/softmax.cpp``. The matrix products before and after are torch's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mmgate.errors import UnsupportedCall

from .. import native
from ..native import TYPES, fields
from ..tracing import hides_numbers
from . import chunked
from .pairs import Pairs
from .softmax import Softmax


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


def attend(pairs: Pairs) -> Tensor:
    """Compute PLuG attention in chunks of queries by the C++ loop.

    Raises:
        UnsupportedCall: There is dropout, a learnt bias or a gate that is no module, or a graph is traced.
    """
    bias = pairs.bias
    asked = {
        f'dropout={pairs.dropout}': pairs.dropout > 0,
        'a bias that needs a gradient': bias is not None and bias.requires_grad,
        'gates that are functions': not isinstance(pairs.modulation, nn.Module),
        'graphs of torch.compile and tensors without numbers': hides_numbers(pairs.query),
    }
    lacking = '; '.join(feature for feature, is_asked in asked.items() if is_asked)
    if lacking:
        raise UnsupportedCall(f"plug_attention: backend 'native' does not have {lacking}. Use 'chunked'.")
    return chunked.attend(pairs, BY_LOOP)


def gated_softmax(
    logits: Tensor,
    factor: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    scalars: Sequence[float] | None = None,
) -> Tensor:
    """Compute :func:`.softmax.gated_softmax` by the C++ loop.

    The arguments are those of that function, but for ``scalars``, the numbers a, b, c and e of a gate. With them
    ``factor`` holds raw gates r, and ``1 + tanh((a r + b) (c r + e))`` is written over them first.
    """
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


def gated_softmax_backward(
    logits: Tensor, factor: Tensor, weights: Tensor, grad_weights: Tensor, delta: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute :func:`.softmax.gated_softmax_backward`, with the same arguments, by the C++ loop."""
    grad_factor = torch.empty_like(factor)
    call = _described(logits, factor)
    call.weights = weights.data_ptr()
    call.grad = grad_weights.data_ptr()
    call.delta = delta.data_ptr()
    call.grad_factor = grad_factor.data_ptr()
    _run(call, backward=True)
    return grad_weights, grad_factor


BY_LOOP = Softmax(gated_softmax, gated_softmax_backward, forms_factor=True)


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
