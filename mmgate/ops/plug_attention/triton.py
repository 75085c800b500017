"""PLuG attention by Triton kernels, as one operator with its gradient.

On the CPU it runs only in Triton's interpreter (``TRITON_INTERPRET=1``), for tests.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import triton_backend
from ..library import operator
from ..triton_backend import MAX_DIM, interpreted, on_device, padded
from .blocks import NUM_WARPS, biased, blocks_for, is_shared

__all__ = ['attend', 'why_not']


def why_not(query: Tensor) -> str | None:
    """Return why this backend cannot run on ``query``, or None."""
    if torch.version.hip is not None and query.device.type == 'cuda':
        return "its products (tf32x3) and its tanh are NVIDIA's, this torch is built for ROCm"
    return triton_backend.why_not(query)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate_query: Tensor,
    gate_key: Tensor,
    modulation: Any,
    bias: Tensor | None = None,
    residual: bool = True,
    position: str = 'pre_softmax',
    dropout: float = 0.0,
) -> Tensor:
    """Attend; arguments and return value as :func:`mmgate.ops.plug_attention`.

    Raises:
        ValueError: What the kernels do not have: another gate than ``tanh((a R + b)(c R + e))`` with the residual
            before the softmax, dropout, a bias that needs a gradient, gates wider than 128 channels, values of another
            width than queries.
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
            (f'values of {value.shape[-1]} channels beside {query.shape[-1]}', value.shape[-1] != query.shape[-1]),
        )
        if lacks
    ]
    if lacking:
        raise ValueError(f"plug_attention: backend 'triton' does not have {'; '.join(lacking)}. Use 'chunked'.")
    a, c = modulation.weight.float().unbind()
    b, e = modulation.bias.float().unbind()
    tensors = (x.to(query.dtype).contiguous() for x in (query, key, value, gate_query, gate_key))
    return _fused(*tensors, torch.stack([a, b, c, e]), bias)[0]


def _launch(name: str, tensors: list[Tensor], inputs: tuple[Tensor, ...], bias: Tensor | None) -> None:
    import triton

    from . import kernels

    query, key, gate_query = inputs
    batch, heads, rows, dim = query.shape
    columns, width = key.shape[2], gate_query.shape[3]
    strides = (0,) * 4 if bias is None else bias.expand(batch, heads, rows, columns).stride()
    blocks = blocks_for(name, query, gate_query, bias)
    by_columns = name.startswith('columns')
    programs = triton.cdiv(columns, blocks.columns) if by_columns else triton.cdiv(rows, blocks.rows)
    kernel = getattr(kernels, name)
    launch = kernel[(programs * batch * (heads // 2 if blocks.pair else heads),)]
    with on_device(query):
        launch(
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
            BIASED=biased(bias),
            ONE_BIAS=is_shared(bias, 1),
            EVEN=by_columns or columns % blocks.columns == 0,
            PAIR=blocks.pair,
            BLOCK_N=blocks.rows,
            BLOCK_M=blocks.columns,
            # an instruction of NVIDIA's, whose error is below the rounding of 16-bit inputs
            FAST_TANH=query.element_size() == 2 and not interpreted(),
            INTERPRETED=interpreted(),
            num_warps=NUM_WARPS,
            num_stages=blocks.stages,
            enable_fp_fusion=True,  # Triton 3.10 turned it off by default
        )


def _fake_fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate_query: Tensor,
    gate_key: Tensor,
    scalars: Tensor,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), query.new_empty((*query.shape[:2], 2, query.shape[2]), dtype=torch.float32)


@operator('plug_attention_fused', fake=_fake_fused)
def _fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate_query: Tensor,
    gate_key: Tensor,
    scalars: Tensor,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp of the logits to base 2, ``(B, H, N)`` float32."""
    output, lse = torch.empty_like(query), query.new_empty((*query.shape[:2], 2, query.shape[2]), dtype=torch.float32)
    if not key.shape[2]:
        return output.zero_(), lse.zero_()
    if output.numel():
        tensors = [query, key, value, gate_query, gate_key, scalars, query if bias is None else bias, output, lse]
        _launch('forward_kernel', tensors, (query, key, gate_query), bias)
    return output, lse


def _fake_fused_backward(
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


@operator('plug_attention_fused_backward', fake=_fake_fused_backward)
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
    columns = key.shape[2]
    by_row, by_column = (blocks_for(f'{axis}_backward_kernel', query, gate_query, bias) for axis in ('rows', 'columns'))
    grad = grad.contiguous()
    delta = (grad.float() * output.float()).sum(-1)
    allocate = torch.empty_like if output.numel() and columns else torch.zeros_like
    grads = [allocate(x) for x in (query, key, value)]
    # what a program, of one head or two, finds for its gate
    per_program = [
        allocate(
            x.expand(-1, heads // 2 if blocks.pair else heads, -1, -1),
            dtype=torch.float32,
            memory_format=torch.contiguous_format,
        )
        for x, blocks in ((gate_query, by_row), (gate_key, by_column))
    ]
    programs = batch * per_program[0].shape[1] * triton.cdiv(rows, by_row.rows)
    shares = query.new_zeros(programs, 4, dtype=torch.float32)
    inputs = [query, key, value, gate_query, gate_key, scalars, query if bias is None else bias, lse, delta, grad]
    shaped = (query, key, gate_query)
    if output.numel() and columns:
        _launch('rows_backward_kernel', [*inputs, grads[0], per_program[0], shares], shaped, bias)
        _launch('columns_backward_kernel', [*inputs, grads[1], grads[2], per_program[1]], shaped, bias)
    gates = [
        x.sum_to_size(gate.shape).to(gate.dtype) for x, gate in zip(per_program, (gate_query, gate_key), strict=True)
    ]
    return grads[0], grads[1], grads[2], gates[0], gates[1], shares.sum(0)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    return (*_fused_backward(grad, *ctx.saved_tensors), None)


_fused.differentiate(_backward, _setup_context)
