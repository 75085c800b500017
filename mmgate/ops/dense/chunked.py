r"""Two backends of PLuG attention in chunks of queries, so that no whole N x M map is in memory.

The matrix products are torch's. The softmax between them is torch's, too (backend ``chunked``), or a C++ loop on the
CPU, ``native/cpp/softmax.cpp`` (backend ``native``). Both are an autograd function whose backward pass computes each
chunk again, in less time and memory than chunks under autograd. Dropout, a learnt bias, any other modulation than a
module, and torch.compile need the latter, which ``chunked`` alone has.

With S = QK^T / sqrt(d), f = 1 + G (or G), L = S f + mask, P = softmax(L), O = P V and delta = rowsum(dO O):

    dV = P^T dO;  dL = P (dO V^T - delta);  df = sum over the heads that share f of dL S;  dS = f dL

and with the gate on the weights, W = P f, O = W V:  dV = W^T dO;  df = dO V^T P;  dL = dS = P (f dO V^T - delta).
Autograd does the rest, from df to the gate: it is elementwise, on one map for all heads that share f.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from mmgate.errors import UnsupportedCall

from .. import native
from ..autocast import autocast_dtype, without_autocast
from ..backend import first_derivatives, save_fields, saved_fields
from ..native import TYPES, fields
from ..tracing import hides_numbers, is_compiling
from . import reference
from .reference import Modulation, Pairs, gate_factor, raw_gates

# Elements of (B, H, rows, M) that are in memory at a time. On a CPU they fit into its cache. On a GPU larger chunks
# need fewer launches.
CHUNK = 1 << 21
CHUNK_ON_GPU = 1 << 26


def attend_native(pairs: Pairs) -> Tensor:
    """Compute PLuG attention in chunks of queries, with the softmax by the C++ loop.

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
    return attend(pairs, by_loop=True)


def attend(pairs: Pairs, *, by_loop: bool = False) -> Tensor:
    """Compute PLuG attention in chunks of queries, with the softmax by torch's operators or by the C++ loop."""
    query = pairs.query
    modulation = pairs.modulation
    batch, heads, rows, _ = query.shape
    step = max(1, chunk_on(query.device) // max(1, batch * heads * pairs.key.shape[-2]))
    if rows <= step:
        return reference.attend(pairs)
    if is_compiling() or not isinstance(modulation, nn.Module):
        return _checkpointed(step, pairs, modulation)
    # Until the backward pass, functional_call and FSDP may have put other tensors into the module.
    bound = _tensors_of(modulation)
    learnt_bias = pairs.bias is not None and pairs.bias.requires_grad
    if pairs.dropout or learnt_bias:
        return _checkpointed(step, pairs, partial(functional_call, modulation, bound))
    device_type = query.device.type
    narrow = autocast_dtype(device_type)
    if narrow is not None:
        names = ('query', 'key', 'value', 'gate_query', 'gate_key')
        pairs = pairs._replace(**{name: getattr(pairs, name).to(narrow) for name in names})
    with without_autocast(device_type):
        return AttentionInChunks.apply(step, by_loop, list(bound), *pairs, *bound.values())


def chunk_on(device: torch.device) -> int:
    """Return how many elements of the N x M maps may be in memory at a time on a device."""
    return CHUNK if device.type == 'cpu' else CHUNK_ON_GPU


def _tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's parameters by name or, under FSDP, the plain tensors that replace them."""
    found: dict[str, Tensor] = {}
    for path, part in module.named_modules():
        for name, value in (part._parameters | vars(part)).items():
            if isinstance(value, Tensor) and value.is_floating_point():
                found[f'{path}.{name}'.lstrip('.')] = value
    return found


def _checkpointed(step: int, pairs: Pairs, modulation: Modulation) -> Tensor:
    """Compute PLuG attention in chunks of ``step`` queries under autograd with activation checkpointing."""
    columns = (pairs.key, pairs.value, pairs.gate_key)
    # Autograd adds the gradients of the chunks in the dtype of these tensors, which has to have 32 bits.
    wide = [x.float() if x.dtype.itemsize < 4 else x for x in columns]

    def attend_rows(query: Tensor, gate_query: Tensor, bias: Tensor | None, *wide: Tensor) -> Tensor:
        key, value, gate_key = (x.to(like.dtype) for x, like in zip(wide, columns, strict=True))
        rows = Pairs(
            query, key, value, gate_query, gate_key, modulation, bias, pairs.residual, pairs.position, pairs.dropout
        )
        return reference.attend(rows)

    outputs = []
    for start in range(0, pairs.query.shape[-2], step):
        rows = slice(start, start + step)
        inputs: Any = (pairs.query[:, :, rows], pairs.gate_query[:, :, rows], rows_of(pairs.bias, rows), *wide)
        if torch.is_grad_enabled():
            outputs.append(checkpoint(attend_rows, *inputs, use_reentrant=False, preserve_rng_state=pairs.dropout > 0))
        else:
            outputs.append(attend_rows(*inputs))
    return torch.cat(outputs, -2)


class Factor:
    """Function that computes the factor of the logits from the gate's queries and keys, with a module's parameters.

    Args:
        modulation: Module that maps raw gates to gates.
        names: Names of the parameters that are handed in, which replace the module's.
        residual: True for the factor ``1 + G``, False for ``G``.
    """

    def __init__(self, modulation: Any, names: Sequence[str], residual: bool) -> None:
        self.modulation = modulation
        self.names = list(names)
        self.residual = residual

    def __call__(self, gate_query: Tensor, gate_key: Tensor, *parameters: Tensor) -> Tensor:
        """Compute the factor that multiplies the logits, ``(B, H|1, N, M)``."""
        given = dict(zip(self.names, parameters, strict=True))
        return gate_factor(gate_query, gate_key, partial(functional_call, self.modulation, given), self.residual)

    def scalars(self, *parameters: Tensor) -> list[float] | None:
        """Return the gate's scalars a, b, c, e if the factor is ``1 + tanh((a r + b) (c r + e))``, else None."""
        fused = getattr(self.modulation, 'is_tanh_of_product', False) and self.residual
        if not fused or sorted(self.names) != ['bias', 'weight']:  # parametrizations have other names
            return None
        given = dict(zip(self.names, parameters, strict=True))
        return torch.stack([given['weight'], given['bias']], 1).flatten().tolist()


class AttentionInChunks(torch.autograd.Function):
    """Autograd function that computes PLuG attention in chunks of queries.

    ``apply(step, by_loop, names, *pairs, *parameters)`` computes ``step`` rows at a time. The pairs are the fields of
    :class:`.reference.Pairs`, without dropout and with a bias that gets no gradient; the parameters are those of the
    modulation, by ``names``.
    """

    @staticmethod
    def forward(ctx: Any, step: int, by_loop: bool, names: Sequence[str], *arguments: Any) -> Tensor:
        """Compute the output ``(B, H, N, e)``, chunk by chunk of queries."""
        pairs = Pairs(*arguments[: len(Pairs._fields)])
        parameters = arguments[len(Pairs._fields) :]
        query, key, value, gate_query, gate_key = pairs[:5]
        factor = Factor(pairs.modulation, names, pairs.residual)
        is_before = pairs.position == 'pre_softmax'
        output = torch.empty((*query.shape[:-1], value.shape[-1]), dtype=query.dtype, device=query.device)
        chunks = _Chunks(step, query, key)
        forms_factor = by_loop and is_before and query.dtype == chunks.dtype
        scalars = factor.scalars(*parameters) if forms_factor else None
        for rows in chunks:
            gate_rows = gate_query[:, :, rows]
            if scalars is None:
                f = factor(gate_rows, gate_key, *parameters).to(chunks.dtype).contiguous()
            else:
                f = raw_gates(gate_rows, gate_key)
            logits = chunks.product(0, query[:, :, rows], key, query.shape[-1] ** -0.5)
            before = f if is_before else None
            weights = gated_softmax(logits, before, rows_of(pairs.bias, rows), logits, scalars, by_loop=by_loop)
            if not is_before:
                weights = weights.mul_(f)
            output[:, :, rows] = weights.to(value.dtype) @ value
        save_fields(ctx, pairs, output, *parameters)
        ctx.step = step
        ctx.by_loop = by_loop
        ctx.names = names
        return output

    @staticmethod
    @first_derivatives
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients of queries, keys, values, the gate's queries and keys, and the gate's parameters."""
        pairs, (output, *parameters) = saved_fields(ctx, Pairs)
        query, key, value, gate_query, gate_key = pairs[:5]
        factor = Factor(pairs.modulation, ctx.names, pairs.residual)
        is_before = pairs.position == 'pre_softmax'
        scale = query.shape[-1] ** -0.5
        chunks = _Chunks(ctx.step, query, key)
        inputs = (query, key, value, gate_query, gate_key, *parameters)
        # Sums over the chunks have at least 32 bits.
        grads = [torch.zeros_like(x, dtype=chunks.dtype) for x in inputs]
        grad_query, grad_key, grad_value, grad_gate_query, grad_gate_key, *grad_parameters = grads
        for rows in chunks:
            leaves = [x.detach().requires_grad_() for x in (gate_query[:, :, rows], gate_key, *parameters)]
            with torch.enable_grad():
                gate = factor(*leaves)
            f = gate.detach().to(chunks.dtype).contiguous()
            q = query[:, :, rows]
            grad = grad_output[:, :, rows]
            logits = chunks.product(0, q, key, scale)
            bias = rows_of(pairs.bias, rows)
            out = chunks.like(1, logits)
            weights = gated_softmax(logits, f if is_before else None, bias, out, by_loop=ctx.by_loop)
            delta = (grad * output[:, :, rows]).sum(-1, keepdim=True, dtype=chunks.dtype)
            grad_weights = chunks.product(2, grad, value, 1.0)
            if is_before:
                grad_value += weights.to(grad.dtype).transpose(-1, -2) @ grad
                given = (logits, f, weights, grad_weights, delta)
                grad_logits, grad_factor = gated_softmax_backward(*given, by_loop=ctx.by_loop)
            else:
                grad_factor = sum_heads(torch.mul(grad_weights, weights, out=logits), gate)
                grad_value += (weights * f).to(grad.dtype).transpose(-1, -2) @ grad
                grad_logits = grad_weights.mul_(f).sub_(delta).mul_(weights)
            narrow = grad_logits.to(q.dtype)
            grad_query[:, :, rows] = narrow @ key * scale
            grad_key += narrow.transpose(-1, -2) @ q * scale
            of_gate = torch.autograd.grad(gate, leaves, grad_factor.to(gate.dtype), allow_unused=True)
            grad_gate_query[:, :, rows] = of_gate[0]
            for total, part in zip((grad_gate_key, *grad_parameters), of_gate[1:], strict=True):
                if part is not None:
                    total += part
        found = [total.to(x.dtype) for total, x in zip(grads, inputs, strict=True)]
        others = (None,) * (len(Pairs._fields) - 5)
        return None, None, None, *found[:5], *others, *found[5:]


class _Chunks:
    """Iterator over chunks of queries (slices), with three buffers of a chunk's map that all chunks share.

    New tensors for each chunk would fragment the heap, to several times the size of the tensors in use.
    """

    def __init__(self, step: int, query: Tensor, key: Tensor) -> None:
        self.step = step
        self.rows = query.shape[-2]
        self.dtype = torch.float32 if query.dtype.itemsize < 4 else query.dtype
        batch, heads = query.shape[:2]
        self.buffers = query.new_empty(3, batch * heads * step * key.shape[-2], dtype=self.dtype)

    def __iter__(self) -> Iterator[slice]:
        for start in range(0, self.rows, self.step):
            yield slice(start, min(start + self.step, self.rows))

    def product(self, buffer: int, rows: Tensor, columns: Tensor, scale: float) -> Tensor:
        """Compute ``rows columns^T scale``, ``(B, H, rows, M)``, in one of the buffers 0 to 2, and return it."""
        out = self._view(buffer, (*rows.shape[:-1], columns.shape[-2]))
        a = rows.flatten(0, 1)
        b = columns.flatten(0, 1).transpose(-1, -2)
        if a.dtype == self.dtype:
            torch.baddbmm(out.flatten(0, 1), a, b, beta=0, alpha=scale, out=out.flatten(0, 1))
        else:
            # Scaled first, because the product may leave half precision.
            out.copy_((a * scale @ b).view_as(out))
        return out

    def like(self, buffer: int, chunk: Tensor) -> Tensor:
        """Return one of the buffers 0 to 2 as a tensor of the shape of ``chunk``."""
        return self._view(buffer, chunk.shape)

    def _view(self, buffer: int, shape: tuple[int, ...]) -> Tensor:
        return self.buffers[buffer, : torch.Size(shape).numel()].view(shape)


def rows_of(bias: Tensor | None, rows: slice) -> Tensor | None:
    """Return the part of a bias for a chunk of queries; a bias that all queries share is returned whole."""
    return bias if bias is None or bias.shape[-2] == 1 else bias[:, :, rows]


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
    *,
    by_loop: bool,
) -> Tensor:
    """Compute ``softmax(logits * factor + bias)`` over the last axis, write it into ``out`` and return it.

    torch's operators go over the chunk again in each step, the C++ loop goes over each row once.

    Args:
        logits: ``(B, H, N, M)``, contiguous, float32 or float64.
        factor: ``(B, H|1, N, M)`` in the dtype of the logits, contiguous; None leaves the logits as they are.
        bias: Four axes that broadcast to ``(B, H, N, M)``, any dtype; None for none.
        out: A contiguous tensor like ``logits``, or ``logits`` itself.
        scalars: The numbers a, b, c and e of a gate, for the C++ loop alone: ``factor`` then holds raw gates r, and
            ``1 + tanh((a r + b) (c r + e))`` is written over them first.
        by_loop: True for the C++ loop, False for torch's operators.
    """
    if not by_loop:
        if factor is None:
            out.copy_(logits)
        else:
            torch.mul(logits, factor, out=out)
        if bias is not None:
            out.add_(bias)
        out.sub_(out.amax(-1, keepdim=True)).exp_()
        return out.div_(out.sum(-1, keepdim=True))
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
    logits: Tensor, factor: Tensor, weights: Tensor, grad_weights: Tensor, delta: Tensor, *, by_loop: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the logits and of the gate's factor, given that of the attention weights.

    Args:
        logits: ``(B, H, N, M)`` before the gate, contiguous. Their values may be lost.
        factor: ``(B, H|1, N, M)``, contiguous.
        weights: What :func:`gated_softmax` returned, contiguous.
        grad_weights: Their gradient, contiguous. The gradient of the logits is written over it.
        delta: Sum of the weights times their gradient over the columns, ``(B, H, N, 1)``, contiguous.
        by_loop: See :func:`gated_softmax`.
    """
    if not by_loop:
        grad_logits = grad_weights.sub_(delta).mul_(weights)
        of_factor = logits.mul_(grad_logits)
        return grad_logits.mul_(factor), sum_heads(of_factor, factor)
    grad_factor = torch.empty_like(factor)
    call = _described(logits, factor)
    call.weights = weights.data_ptr()
    call.grad = grad_weights.data_ptr()
    call.delta = delta.data_ptr()
    call.grad_factor = grad_factor.data_ptr()
    _run(call, backward=True)
    return grad_weights, grad_factor


def sum_heads(grad: Tensor, factor: Tensor) -> Tensor:
    """Sum the gradient of the gate's factor over the heads if all heads share one gate."""
    return grad.sum(1, keepdim=True) if factor.shape[1] == 1 else grad


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
