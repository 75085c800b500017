"""GPU backend of PLuG attention by mmgate's Triton kernels, as one custom operator with its gradient.

On the CPU it runs only in Triton's interpreter (``TRITON_INTERPRET=1``), for tests.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmgate.errors import UnsupportedCall

from .. import triton_backend
from ..backend import Place, arguments_of, operator
from ..triton_backend import MAX_DIM, compile_only, interpreted, launch, needs_backward, power_of_two, target_of
from .reference import Modulation, Pairs

# Block sizes were chosen by the listings of compiled kernels. On an H100 no other that we tried was faster, at 4096
# tokens of 32 channels in bfloat16 (KERNELS.md). A shape is the rows and columns of a block, and pipeline stages.
Shape = tuple[int, int, int]
# The keys are the bytes of an element, the kernel, and the padded number of channels or of gate channels, whichever is
# larger. A side is 64 where the listing for sm_90 shows warpgroup products and hardly a spill (KERNELS.md). No entry
# needs more than 99 KiB of shared memory, which every GPU since sm_80 has.
BLOCKS: dict[int, dict[str, dict[int, Shape]]] = {
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
# The same for programs of two heads that share their gate, on sm_8x and sm_12x. The keys are the bytes of an element,
# the kernel, and True for a bias with rows and columns. A program of two heads is taken where it needs fewer
# instructions for each head, and as many heads are at work in a multiprocessor as with programs of one head. Without a
# bias it does not spill, with one it spills a few words (KERNELS.md has the counts). Without an entry a program has one
# head.
SM_80_AND_120: dict[tuple[int, str, bool], dict[int, Shape]] = {
    (2, 'forward_kernel', False): {16: (64, 64, 3), 32: (64, 64, 2), 64: (64, 32, 2)},
    (2, 'rows_backward_kernel', False): {16: (64, 32, 3), 32: (64, 16, 3)},
    (2, 'columns_backward_kernel', False): {16: (32, 64, 3), 32: (16, 64, 3)},
    (2, 'forward_kernel', True): {16: (64, 32, 3), 32: (64, 32, 2)},
    (2, 'rows_backward_kernel', True): {16: (64, 16, 3), 32: (64, 16, 3)},
    (2, 'columns_backward_kernel', True): {16: (16, 64, 3), 32: (16, 64, 3)},
}
# The same on sm_90.
SM_90: dict[tuple[int, str, bool], dict[int, Shape]] = {
    (2, 'forward_kernel', False): {16: (64, 64, 3), 32: (64, 64, 3), 64: (64, 64, 2)},
    (2, 'rows_backward_kernel', False): {16: (64, 32, 3), 32: (64, 32, 3), 64: (64, 16, 2)},
    (2, 'columns_backward_kernel', False): {16: (32, 64, 3), 32: (32, 64, 3)},
    (2, 'forward_kernel', True): {16: (64, 32, 3), 32: (64, 32, 3), 64: (64, 32, 2)},
    (2, 'rows_backward_kernel', True): {16: (64, 32, 3), 32: (64, 32, 3)},
    (2, 'columns_backward_kernel', True): {16: (32, 64, 3), 32: (16, 64, 3)},
    (4, 'forward_kernel', False): {16: (64, 32, 2), 32: (64, 32, 2)},
}
# By the first number of the compute capability.
PAIRED = {8: SM_80_AND_120, 9: SM_90, 12: SM_80_AND_120}
# In the interpreter blocks have the least sides that a product takes, so that small shapes have several blocks.
SMALL_BLOCKS = (16, 16, 1)


class Blocks(NamedTuple):
    """Division of a Triton kernel's work: rows and columns of a block, heads of a program, number of warps.

    Attributes:
        pair: True if a program has two heads, False if it has one.
        rows: Rows of a block.
        columns: Columns of a block.
        stages: Pipeline stages.
        warps: Warps of a program.
    """

    pair: bool
    rows: int
    columns: int
    stages: int
    warps: int = 4


def blocks_for(name: str, query: Tensor, gate_query: Tensor, bias: Tensor | None) -> Blocks:
    """Choose the block sizes of the kernel called ``name`` for these tensors; Triton's interpreter gets small ones."""
    if interpreted():
        return Blocks(can_pair(query, gate_query, bias), *SMALL_BLOCKS)
    return blocks_on(target_of(query.device).arch, name, query, gate_query, bias)


def blocks_on(arch: int, name: str, query: Tensor, gate_query: Tensor, bias: Tensor | None) -> Blocks:
    """Choose the block sizes of a kernel on GPUs of an architecture, such as 90 for sm_90."""
    widest = power_of_two(max(query.shape[-1], gate_query.shape[-1]))
    full_bias = biased(bias) == 2
    entry = PAIRED.get(arch // 10, {}).get((query.element_size(), name, full_bias), {}).get(widest)
    if can_pair(query, gate_query, bias) and entry is not None:
        return Blocks(True, *entry)
    rows, columns, stages = BLOCKS[query.element_size()][name][widest]
    return Blocks(False, rows, columns, 1 if full_bias and widest == MAX_DIM else stages)


def can_pair(query: Tensor, gate_query: Tensor, bias: Tensor | None) -> bool:
    """Return True if a program can have two heads, which share their gate and their bias."""
    return gate_query.shape[1] == 1 and query.shape[1] % 2 == 0 and is_shared(bias, 1)


def gate_block(name: str, query: Tensor, gate_query: Tensor) -> int:
    """Return the padded number of channels of the gate in the kernel ``name``.

    Beside heads of 128 channels in 16 bits ``columns_backward_kernel`` has at least 64 of the gate. With 32 or fewer
    products are repeated, and it spills up to 4.3 kB a thread (KERNELS.md).
    """
    width = power_of_two(gate_query.shape[-1])
    beside_wide_heads = query.element_size() == 2 and power_of_two(query.shape[-1]) == MAX_DIM
    return max(width, 64) if beside_wide_heads and name == 'columns_backward_kernel' else width


def is_shared(bias: Tensor | None, axis: int) -> bool:
    """Return True if there is no bias, or if the bias is the same for all indices of an axis."""
    return bias is None or bias.shape[axis] == 1 or bias.stride(axis) == 0


def biased(bias: Tensor | None) -> int:
    """Return the kernels' constant for a bias: 0 without one, 1 for one that all rows share, 2 for any other."""
    if bias is None:
        return 0
    return 1 if is_shared(bias, 2) else 2


class KernelTensors(NamedTuple):
    """The tensors of a call, as the kernels need them: contiguous (but for the bias), and the gate's scalars.

    ``scalars`` are the gate's a, b, c and e in float32.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    gate_query: Tensor
    gate_key: Tensor
    scalars: Tensor
    bias: Tensor | None


def why_not_triton_dense(query: Tensor) -> str | None:
    """Return the reason why this backend cannot run on ``query``, or None if it can."""
    if torch.version.hip is not None and query.device.type == 'cuda':
        return "its products (tf32x3) and its tanh are NVIDIA's, this torch is built for ROCm"
    return triton_backend.why_not_triton(query)


def place_of_triton(query: Tensor) -> Place:
    """Return where ``auto`` looks at this backend: first on GPUs like the one that it was timed on, else not at all."""
    return 'first' if triton_backend.is_measured(query) else 'by name'


def advice_for_triton(query: Tensor) -> str | None:
    """Return what to try on a GPU on which nobody has timed this backend, or None."""
    return triton_backend.advice(query, why_not_triton_dense(query))


def check_gate(
    modulation: Modulation, gate_width: int, residual: bool, position: str, more: dict[str, bool] | None = None
) -> None:
    """Raise an error for any gate but the one that the kernels compute: ``1 + tanh((a R + b)(c R + e))`` on the logits.

    Args:
        modulation: Elementwise function from raw gates to gates.
        gate_width: Channels of the gate's queries and keys.
        residual: See :func:`mmgate.ops.plug_attention`.
        position: See :func:`mmgate.ops.plug_attention`.
        more: Further features that the kernels do not have, True for those that are asked for.

    Raises:
        UnsupportedCall: The message names all features that are asked for and not there.
    """
    gate = (getattr(modulation, 'variant', None), getattr(modulation, 'activation', None))
    is_fused = getattr(modulation, 'is_tanh_of_product', False)
    asked = {
        **(more or {}),
        f'the gate {gate} (gml, activation), only tanh of the product': not is_fused,
        'residual=False': not residual,
        f'position={position!r}': position != 'pre_softmax',
        f'gates of {gate_width} channels': gate_width > MAX_DIM,
    }
    lacking = '; '.join(feature for feature, is_asked in asked.items() if is_asked)
    if lacking:
        raise UnsupportedCall(f"plug_attention: backend 'triton' does not have {lacking}. Use 'chunked'.")


def attend(pairs: Pairs) -> Tensor:
    """Compute PLuG attention by the Triton kernels.

    Raises:
        UnsupportedCall: See :func:`check_gate`; or a kernel does not compile.
    """
    query = pairs.query
    bias = pairs.bias
    value_dim = pairs.value.shape[-1]
    more = {
        f'dropout={pairs.dropout}': pairs.dropout > 0,
        'a bias that needs a gradient': bias is not None and bias.requires_grad,
        f'values of {value_dim} channels beside {query.shape[-1]}': value_dim != query.shape[-1],
    }
    check_gate(pairs.modulation, pairs.gate_query.shape[-1], pairs.residual, pairs.position, more)
    product: Any = pairs.modulation
    scalars = torch.stack([product.weight.float(), product.bias.float()], 1).flatten()  # a, b, c, e
    tensors = KernelTensors(
        query=query.contiguous(),
        key=pairs.key.to(query.dtype).contiguous(),
        value=pairs.value.to(query.dtype).contiguous(),
        gate_query=pairs.gate_query.to(query.dtype).contiguous(),
        gate_key=pairs.gate_key.to(query.dtype).contiguous(),
        scalars=scalars,
        bias=bias,
    )
    if needs_backward(tensors):
        _compile_backward(tensors)
    return _fused(*tensors)[0]


def _compile_backward(tensors: KernelTensors) -> None:
    """Compile both backward kernels for a call, by the dtypes of the tensors that are not there yet.

    Raises:
        UnsupportedCall: One does not compile.
    """
    own = tensors.query.dtype
    wide = torch.float32
    _launch('rows_backward_kernel', tensors, (wide, wide, own, own, wide, wide), only_compile=True)
    _launch('columns_backward_kernel', tensors, (wide, wide, own, own, own, wide), only_compile=True)


def _launch(
    name: str, tensors: KernelTensors, others: tuple[Tensor | torch.dtype, ...], *, only_compile: bool = False
) -> None:
    """Launch one of the three kernels on a call's tensors and on further tensors of its pass, or compile it.

    To compile it, the further tensors' dtypes are enough.
    """
    import triton

    from . import dense_kernels

    query = tensors.query
    bias = tensors.bias
    batch, heads, rows, dim = query.shape
    columns = tensors.key.shape[2]
    width = tensors.gate_query.shape[3]
    strides = (0,) * 4 if bias is None else bias.expand(batch, heads, rows, columns).stride()
    blocks = blocks_for(name, query, tensors.gate_query, bias)
    by_columns = name.startswith('columns')
    programs = triton.cdiv(columns, blocks.columns) if by_columns else triton.cdiv(rows, blocks.rows)
    grid = (programs * batch * (heads // 2 if blocks.pair else heads),)
    # Without a bias its argument is not read, so any tensor will do.
    given = [*tensors[:6], query if bias is None else bias, *others]
    numbers = [heads, tensors.gate_query.shape[1], rows, columns, *strides, dim**-0.5, width**-0.5]
    start = compile_only if only_compile else launch
    start(
        getattr(dense_kernels, name),
        grid,
        query.device,
        *given,
        *numbers,
        D=dim,
        E=width,
        BLOCK_D=power_of_two(dim),
        BLOCK_E=gate_block(name, query, tensors.gate_query),
        PAIR=blocks.pair,
        BLOCK_N=blocks.rows,
        BLOCK_M=blocks.columns,
        BIASED=biased(bias),
        EVEN=by_columns or columns % blocks.columns == 0,
        # NVIDIA's instruction has an error below the rounding of 16-bit inputs.
        FAST_TANH=query.element_size() == 2 and not interpreted(),
        INTERPRETED=interpreted(),
        num_warps=blocks.warps,
        num_stages=blocks.stages,
    )


def _outputs(query: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    batch, heads, rows, _ = query.shape
    return torch.empty_like(query), query.new_empty(batch, heads, 2, rows, dtype=torch.float32)


@operator('plug_attention_fused', _outputs, f'({arguments_of(KernelTensors)}) -> (Tensor, Tensor)')
def _fused(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Run the forward kernel; return the output, and each softmax's log-sum-exp in two parts, ``(B, H, 2, N)``.

    The parts are the largest exponent and log2 of the sum, in float32.
    """
    tensors = KernelTensors(*arguments)
    output, lse = _outputs(*tensors)
    if not tensors.key.shape[2]:
        return output.zero_(), lse.zero_()
    if output.numel():
        _launch('forward_kernel', tensors, (output, lse))
    return output, lse


def _gradients(grad: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x) for x in arguments[:6])


@operator(
    'plug_attention_fused_backward',
    _gradients,
    f'(Tensor grad, {arguments_of(KernelTensors)}, Tensor output, Tensor lse) '
    '-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)',
)
def _fused_backward(grad: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """Run both backward kernels; return the gradients of the five tensors and the gate's four scalars."""
    import triton

    *inputs, output, lse = arguments
    tensors = KernelTensors(*inputs)
    batch, heads, rows, _ = tensors.query.shape
    if not output.numel() or not tensors.key.shape[2]:
        return tuple(torch.zeros_like(x) for x in tensors[:6])
    grad = grad.contiguous()
    delta = (grad.float() * output.float()).sum(-1)
    grad_query = torch.empty_like(tensors.query)
    grad_key = torch.empty_like(tensors.key)
    grad_value = torch.empty_like(tensors.value)
    by_row = blocks_for('rows_backward_kernel', tensors.query, tensors.gate_query, tensors.bias)
    by_column = blocks_for('columns_backward_kernel', tensors.query, tensors.gate_query, tensors.bias)
    # Each program, of one head or two, stores its share of the gradients of the gate.
    of_rows = _shares(tensors.gate_query, heads // 2 if by_row.pair else heads)
    of_columns = _shares(tensors.gate_key, heads // 2 if by_column.pair else heads)
    of_scalars = grad.new_empty(batch * of_rows.shape[1] * triton.cdiv(rows, by_row.rows), 4, dtype=torch.float32)
    _launch('rows_backward_kernel', tensors, (lse, delta, grad, grad_query, of_rows, of_scalars))
    _launch('columns_backward_kernel', tensors, (lse, delta, grad, grad_key, grad_value, of_columns))
    grad_gate_query = of_rows.sum_to_size(tensors.gate_query.shape).to(tensors.gate_query.dtype)
    grad_gate_key = of_columns.sum_to_size(tensors.gate_key.shape).to(tensors.gate_key.dtype)
    return grad_query, grad_key, grad_value, grad_gate_query, grad_gate_key, of_scalars.sum(0)


def _shares(gate: Tensor, heads: int) -> Tensor:
    """Allocate the programs' shares ``(B, heads, N|M, g)`` of a gradient of the gate's queries or keys."""
    return gate.new_empty(gate.shape[0], heads, *gate.shape[2:], dtype=torch.float32)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    return (*_fused_backward(grad, *ctx.saved_tensors), None)


_fused.differentiate(_backward, _setup_context)
