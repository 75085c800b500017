"""PLuG attention by Triton kernels, as one registered torch op with its gradient.

On the CPU it runs only in Triton's interpreter (``TRITON_INTERPRET=1``), for tests.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .triton_backend import MAX_DIM, interpreted, padded

# Rows and columns of a block, by the wider of padded channels and gate channels: what fits into the registers of sm_90
# in 16 bits without spilling, see KERNEL.md.
BLOCKS = {
    'forward_kernel': {16: (64, 32), 32: (64, 32), 64: (64, 32), 128: (64, 32)},
    'rows_backward_kernel': {16: (64, 32), 32: (64, 32), 64: (32, 32), 128: (16, 32)},
    'columns_backward_kernel': {16: (32, 32), 32: (32, 32), 64: (32, 32), 128: (32, 32)},
}
NUM_WARPS = 4
SMALL_BLOCKS = (16, 16)  # in the interpreter, so that small shapes have several; the least that a product takes


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate_query: Tensor,
    gate_key: Tensor,
    modulation: Any,
    bias: Tensor | None = None,
    *,
    residual: bool = True,
    position: str = 'pre_softmax',
    dropout: float = 0.0,
) -> Tensor:
    """Attend; arguments and return value as :func:`mmgate.ops.plug_attention`.

    Raises:
        ValueError: What the kernels do not have: another gate than ``tanh((a R + b)(c R + e))`` with the residual
            before the softmax, dropout, a bias that needs a gradient, gates wider than 128 channels.
    """
    kind = getattr(modulation, 'variant', None), getattr(modulation, 'activation', None)
    lacking = [
        reason
        for reason, lacks in (
            (f'the gate {kind} (gml, activation), only (product, tanh)', kind != ('product', 'tanh')),
            ('residual=False', not residual),
            (f'position={position!r}', position != 'pre_softmax'),
            (f'dropout={dropout}', dropout > 0),
            ('a bias that needs a gradient', bias is not None and bias.requires_grad),
            (f'gates of {gate_query.shape[-1]} channels', gate_query.shape[-1] > MAX_DIM),
        )
        if lacks
    ]
    if lacking:
        raise ValueError(f"plug_attention: backend 'triton' does not have {'; '.join(lacking)}. Use 'chunked'.")
    a, c = modulation.weight.float().unbind()
    b, e = modulation.bias.float().unbind()
    tensors = (x.to(query.dtype).contiguous() for x in (query, key, value, gate_query, gate_key))
    return torch.ops.mmgate.plug_attention_fused(*tensors, torch.stack([a, b, c, e]), bias)[0]


def _blocks(name: str, query: Tensor, gate_query: Tensor) -> tuple[int, int]:
    widest = padded(max(query.shape[-1], gate_query.shape[-1]))
    return SMALL_BLOCKS if interpreted() else BLOCKS[name][widest]


def _launch(name: str, tensors: list[Tensor], inputs: tuple[Tensor, ...], bias: Tensor | None) -> None:
    import triton

    from . import plug_attention_kernels

    query, key, gate_query = inputs
    batch, heads, rows, dim = query.shape
    columns, width = key.shape[2], gate_query.shape[3]
    block_n, block_m = _blocks(name, query, gate_query)
    programs = triton.cdiv(columns, block_m) if name.startswith('columns') else triton.cdiv(rows, block_n)
    strides = (0,) * 4 if bias is None else bias.expand(batch, heads, rows, columns).stride()
    kernel = getattr(plug_attention_kernels, name)
    kernel[programs, batch * heads](
        *tensors,
        heads,
        gate_query.shape[1],
        rows,
        columns,
        *strides,
        dim**-0.5,
        width**-0.5,
        D=dim,
        E=width,
        BLOCK_D=padded(dim),
        BLOCK_E=padded(width),
        BIASED=bias is not None,
        BLOCK_N=block_n,
        BLOCK_M=block_m,
        num_warps=NUM_WARPS,
    )


@torch.library.custom_op('mmgate::plug_attention_fused', mutates_args=())
def _fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate_query: Tensor,
    gate_key: Tensor,
    scalars: Tensor,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp of the logits, ``(B, H, N)`` float32."""
    output, lse = torch.empty_like(query), query.new_empty(query.shape[:3], dtype=torch.float32)
    if output.numel():
        tensors = [query, key, value, gate_query, gate_key, scalars, query if bias is None else bias, output, lse]
        _launch('forward_kernel', tensors, (query, key, gate_query), bias)
    return output, lse


@_fused.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate_query: Tensor,
    gate_key: Tensor,
    scalars: Tensor,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), query.new_empty(query.shape[:3], dtype=torch.float32)


@torch.library.custom_op('mmgate::plug_attention_fused_backward', mutates_args=())
def _fused_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate_query: Tensor,
    gate_key: Tensor,
    scalars: Tensor,
    bias: Tensor | None,
    output: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of the five tensors and the four scalars."""
    import triton

    batch, heads, rows, _ = query.shape
    columns, width = key.shape[2], gate_query.shape[3]
    block_n, _ = _blocks('rows_backward_kernel', query, gate_query)
    grad = grad.contiguous()
    delta = (grad.float() * output.float()).sum(-1)
    grads = [torch.zeros_like(x) for x in (query, key, value)]
    per_head = [query.new_zeros(batch, heads, count, width, dtype=torch.float32) for count in (rows, columns)]
    shares = query.new_zeros(batch * heads * triton.cdiv(rows, block_n), 4, dtype=torch.float32)
    inputs = [query, key, value, gate_query, gate_key, scalars, query if bias is None else bias, lse, delta, grad]
    shaped = (query, key, gate_query)
    if output.numel() and columns:
        row_grads = [grads[0], per_head[0], shares]
        _launch('rows_backward_kernel', [*inputs, *row_grads], shaped, bias)
        column_grads = [grads[1], grads[2], per_head[1]]
        _launch('columns_backward_kernel', [*inputs, *column_grads], shaped, bias)
    gates = [
        total.sum_to_size(x.shape).to(x.dtype) for total, x in zip(per_head, (gate_query, gate_key), strict=True)
    ]  # fmt: skip
    return grads[0], grads[1], grads[2], gates[0].clone(), gates[1].clone(), shares.sum(0)


@_fused_backward.register_fake
def _(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate_query: Tensor,
    gate_key: Tensor,
    scalars: Tensor,
    bias: Tensor | None,
    output: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    q, k, v, gq, gk, s = (torch.empty_like(x) for x in (query, key, value, gate_query, gate_key, scalars))
    return q, k, v, gq, gk, s


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    return (*torch.ops.mmgate.plug_attention_fused_backward(grad, *ctx.saved_tensors), None)


_fused.register_autograd(_backward, setup_context=_setup_context)
