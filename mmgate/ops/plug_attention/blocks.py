"""How the Triton kernels of PLuG attention are cut into programs: by listings, as no GPU has run them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..triton_backend import MAX_DIM, interpreted, padded, target_of

# Rows and columns of a block and pipeline stages, by bytes of an element and the wider of padded channels and gate
# channels: 64 where the listing for sm_90 shows warpgroup products and hardly a spill (KERNELS.md), and never more than
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
# The same of programs of two heads that share their gate, on sm_8x and sm_12x and then on sm_90, also by whether there
# is a bias of rows and columns. Such a program is taken where it needs fewer instructions a head and as many heads are
# at work in a multiprocessor as by programs of one head; it does not spill without a bias, and a few words with one
# (KERNELS.md has the counts). No entry: one head.
OLDER: dict[tuple[int, str, bool], dict[int, tuple[int, int, int]]] = {
    (2, 'forward_kernel', False): {16: (64, 64, 3), 32: (64, 64, 2), 64: (64, 32, 2)},
    (2, 'rows_backward_kernel', False): {16: (64, 32, 3), 32: (64, 16, 3)},
    (2, 'columns_backward_kernel', False): {16: (32, 64, 3), 32: (16, 64, 3)},
    (2, 'forward_kernel', True): {16: (64, 32, 3), 32: (64, 32, 2)},
    (2, 'rows_backward_kernel', True): {16: (64, 16, 3), 32: (64, 16, 3)},
    (2, 'columns_backward_kernel', True): {16: (16, 64, 3), 32: (16, 64, 3)},
}
SM_90: dict[tuple[int, str, bool], dict[int, tuple[int, int, int]]] = {
    (2, 'forward_kernel', False): {16: (64, 64, 3), 32: (64, 64, 3), 64: (64, 64, 2)},
    (2, 'rows_backward_kernel', False): {16: (64, 32, 3), 32: (64, 32, 3), 64: (64, 16, 2)},
    (2, 'columns_backward_kernel', False): {16: (32, 64, 3), 32: (32, 64, 3)},
    (2, 'forward_kernel', True): {16: (64, 32, 3), 32: (64, 32, 3), 64: (64, 32, 2)},
    (2, 'rows_backward_kernel', True): {16: (64, 32, 3), 32: (64, 32, 3)},
    (2, 'columns_backward_kernel', True): {16: (32, 64, 3), 32: (16, 64, 3)},
    (4, 'forward_kernel', False): {16: (64, 32, 2), 32: (64, 32, 2)},
}
PAIRED = {8: OLDER, 9: SM_90, 12: OLDER}  # by tens of the compute capability
SMALL_BLOCKS = (16, 16, 1)  # in the interpreter, so that small shapes have several; the least that a product takes


class Blocks(NamedTuple):
    """How a kernel works: two heads a program or one, rows and columns of a block, pipeline stages, warps."""

    pair: bool
    rows: int
    columns: int
    stages: int
    warps: int = 4


def blocks_for(name: str, query: Tensor, gate_query: Tensor, bias: Tensor | None) -> Blocks:
    """Return how the kernel ``name`` works on these tensors, by small blocks in the interpreter."""
    pairs = gate_query.shape[1] == 1 and query.shape[1] % 2 == 0 and is_shared(bias, 1)
    if interpreted():
        return Blocks(pairs, *SMALL_BLOCKS)
    widest, full_bias = padded(max(query.shape[-1], gate_query.shape[-1])), biased(bias) == 2
    of_pairs = PAIRED.get(target_of(query.device).arch // 10, {})
    entry = of_pairs.get((query.element_size(), name, full_bias), {}).get(widest)
    if pairs and entry is not None:
        return Blocks(True, *entry)
    rows, columns, stages = BLOCKS[query.element_size()][name][widest]
    return Blocks(False, rows, columns, 1 if full_bias and widest == MAX_DIM else stages)


def is_shared(bias: Tensor | None, axis: int) -> bool:
    """Return whether there is one bias for all of ``axis``, or none."""
    return bias is None or bias.shape[axis] == 1 or bias.stride(axis) == 0


def biased(bias: Tensor | None) -> int:
    """Return 0 for no bias, 1 for one of all rows, 2 for another."""
    return 0 if bias is None else 1 if is_shared(bias, 2) else 2
