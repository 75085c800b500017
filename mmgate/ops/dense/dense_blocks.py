"""Choose the block sizes of PLuG attention's Triton kernels, by GPU and dtype.

They were chosen by the listings of compiled kernels. On an H100 no other that we tried was faster, at 4096
tokens of 32 channels in bfloat16 (KERNELS.md).
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..triton_backend import MAX_DIM, interpreted, power_of_two, target_of

# Rows and columns of a block, and pipeline stages.
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
    pairs = gate_query.shape[1] == 1 and query.shape[1] % 2 == 0 and is_shared(bias, 1)
    if interpreted():
        return Blocks(pairs, *SMALL_BLOCKS)
    widest = power_of_two(max(query.shape[-1], gate_query.shape[-1]))
    full_bias = biased(bias) == 2
    of_pairs = PAIRED.get(target_of(query.device).arch // 10, {})
    entry = of_pairs.get((query.element_size(), name, full_bias), {}).get(widest)
    if pairs and entry is not None:
        return Blocks(True, *entry)
    rows, columns, stages = BLOCKS[query.element_size()][name][widest]
    return Blocks(False, rows, columns, 1 if full_bias and widest == MAX_DIM else stages)


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
