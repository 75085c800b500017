"""PLuG attention by Triton kernels, as one operator with its gradient.

On the CPU it runs only in Triton's interpreter (``TRITON_INTERPRET=1``), for tests.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import triton_backend
from ..library import operator
from ..triton_backend import MAX_DIM, interpreted, on_device, padded

__all__ = ['attend', 'blocks_of', 'why_not']
# Rows and columns of a block and pipeline stages, by bytes of an element and the wider of padded channels and gate
# channels: 64 where the listing for sm_90 shows warpgroup products without spills (KERNEL.md), and never more than
# 99 KiB of shared memory, which every GPU since sm_80 has.
BLOCKS = {
    2: {
        'forward_kernel': {16: (64, 64, 3), 32: (64, 64, 3), 64: (64, 64, 2), 128: (64, 32, 2)},
        'rows_backward_kernel': {16: (64, 32, 3), 32: (64, 32, 3), 64: (64, 32, 2), 128: (64, 32, 2)},
        'columns_backward_kernel': {16: (32, 64, 3), 32: (32, 64, 3), 64: (32, 64, 2), 128: (32, 32, 2)},
    },
    4: {
        'forward_kernel': {16: (64, 32, 2), 32: (64, 32, 2), 64: (32, 32, 2), 128: (16, 32, 1)},
        'rows_backward_kernel': {16: (64, 32, 2), 32: (64, 32, 2), 64: (32, 32, 2), 128: (16, 32, 2)},
        'columns_backward_kernel': {16: (32, 64, 2), 32: (32, 64, 2), 64: (32, 32, 2), 128: (32, 16, 2)},
    },
}
# The same of programs of two heads that share their gate, by bytes, kernel and width, and by the GPU's generation,
# 9 for sm_90. Where there is no entry, or a full bias, a program has one head (KERNEL.md).
PAIRED: dict[tuple[int, str, int], dict[int, tuple[int, int, int]]] = {}
NUM_WARPS = 4
SMALL_BLOCKS = (16, 16, 1)  # in the interpreter, so that small shapes have several; the least that a product takes


class Blocks(NamedTuple):
    """How a kernel works: two heads a program or one, rows and columns of a block, pipeline stages."""

    pair: bool
    rows: int
    columns: int
    stages: int


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


def blocks_of(name: str, itemsize: int, widest: int, full_bias: bool, shared: bool, capability: int) -> Blocks:
    """Return how a kernel works where one that is compiled for ``capability`` is launched.

    Args:
        name: Of the kernel.
        itemsize: Bytes of an element.
        widest: The wider of padded channels and gate channels: 16, 32, 64 or 128.
        full_bias: There is a bias of rows and columns, which the stages hold, too.
        shared: Pairs of heads share their gate.
        capability: Of the GPU: 90 for sm_90.
    """
    paired = PAIRED.get((itemsize, name, widest), {}).get(capability // 10) if shared and not full_bias else None
    if paired is not None:
        return Blocks(True, *paired)
    rows, columns, stages = BLOCKS[itemsize][name][widest]
    return Blocks(False, rows, columns, 1 if full_bias and widest == MAX_DIM else stages)


@functools.cache
def _capability(device: torch.device) -> int:
    from triton.runtime import driver

    with torch.cuda.device(device) if device.type == 'cuda' else nullcontext():
        return int(driver.active.get_current_target().arch)


def _blocks(name: str, query: Tensor, gate_query: Tensor, biased: int) -> Blocks:
    shared = gate_query.shape[1] == 1 and query.shape[1] % 2 == 0
    if interpreted():
        return Blocks(shared, *SMALL_BLOCKS)
    widest = padded(max(query.shape[-1], gate_query.shape[-1]))
    return blocks_of(name, query.element_size(), widest, biased == 2, shared, _capability(query.device))


def _biased(bias: Tensor | None) -> int:
    """Return 0 for no bias, 1 for one of all rows, 2 for another."""
    return 0 if bias is None else 1 if bias.shape[2] == 1 or bias.stride(2) == 0 else 2


def _launch(name: str, tensors: list[Tensor], inputs: tuple[Tensor, ...], bias: Tensor | None) -> None:
    import triton

    from . import kernels

    query, key, gate_query = inputs
    batch, heads, rows, dim = query.shape
    columns, width = key.shape[2], gate_query.shape[3]
    strides = (0,) * 4 if bias is None else bias.expand(batch, heads, rows, columns).stride()
    biased = _biased(bias)
    blocks = _blocks(name, query, gate_query, biased)
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
            BIASED=biased,
            ONE_BIAS=strides[1] == 0,
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
    return torch.empty_like(query), query.new_empty(query.shape[:3], dtype=torch.float32)


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
    output, lse = torch.empty_like(query), query.new_empty(query.shape[:3], dtype=torch.float32)
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
    biased = _biased(bias)
    by_row, by_column = (_blocks(f'{axis}_backward_kernel', query, gate_query, biased) for axis in ('rows', 'columns'))
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
