"""Compile the Triton kernels and print numbers of their machine code: registers, spills, shared memory, instructions.

    python tools/dev/kernels/listings.py --op ms_deform_attn --capability 90

It needs Triton, but no GPU. The operators are called at an encoder's and a segmentation head's sizes, and the kernels
that they would launch are compiled and read. Counts are the load on a multiprocessor, not times.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from launches import compile_for, plug, sampler
from warpgroups import hazards

DTYPES = {'fp32': torch.float32, 'fp16': torch.float16, 'bf16': torch.bfloat16}
CAPABILITIES = (80, 86, 89, 90, 100, 120)  # Ampere, Ada, Hopper and Blackwell; 86, 89 and 120 are what is on a desk
CAPABILITY = 90
SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}  # KiB of shared memory that a program may have
SHAPES = ((100, 167), (50, 84), (25, 42), (13, 21))  # of an image of 800 x 1333
POINTS = 4
TOKENS = 4096
OPS = ('ms_deform_attn', 'plug_attention')


@dataclass(frozen=True)
class Listing:
    """One compiled kernel.

    Attributes:
        kernel: Name of the kernel.
        dtype: Dtype of the inputs: ``'fp32'``, ``'fp16'`` or ``'bf16'``.
        dim: Channels of a head (and of the gate).
        block: Block of a program: queries; or rows, columns and heads.
        registers: Registers of a thread.
        spilled: Bytes of a thread on the stack.
        shared: Bytes of shared memory of a program.
        instructions: Instructions of a warp in the main loop, for one sample of one query (``ms_deform_attn``) or for
            32 elements of the map (``plug_attention``).
        special: Those of the special-function units among them (MUFU: exponentials, tanh, reciprocals); a
            multiprocessor starts one in two cycles.
        barriers: Barriers in the main loop.
        hazards: Instructions that touch registers of warpgroup products in flight; none if the assembler is right.
        in_flight: Average number of the widest loads of the main loop, or of the loop in it, that are issued before the
            values of one of them are used.
        opcodes: Number of each opcode, with its modifiers, in the whole kernel.
    """

    kernel: str
    dtype: str
    dim: int
    block: str
    registers: int
    spilled: int
    shared: int
    instructions: float
    special: float
    barriers: int
    hazards: list[str]
    in_flight: float
    opcodes: dict[str, int]


def listings(
    op: str,
    dtype: str,
    dim: int,
    capability: int,
    bias: int = 0,
    shared: bool = True,
    tokens: int = TOKENS,
    width: int | None = None,
) -> list[Listing]:
    """Compile the kernels that a call of an operator and its gradient launch, and read their listings.

    Args:
        op: One of :data:`OPS`: the sampler of an encoder, or PLuG attention of 8 heads.
        dtype: A key of :data:`DTYPES`.
        dim: Channels of a head.
        capability: Compute capability in :data:`CAPABILITIES`, the same in all calls of a process.
        bias: For ``plug_attention``, 0 for none, 1 for one of all rows (padding), 2 for a full one, 3 for a full one of
            each head.
        shared: For ``plug_attention``, True if the heads share their gate.
        tokens: For ``plug_attention``, rows and columns.
        width: For ``plug_attention``, channels of the gate's queries and keys; ``dim`` by default.

    Raises:
        RuntimeError: Triton's interpreter is on, or this Triton brings no disassembler.
    """
    found: list[Listing] = []

    def read(name: str, kernel: Any, constants: dict[str, Any]) -> None:
        if name != 'order_kernel':
            found.append(_listing(name, kernel, constants, dtype, dim))

    compile_for(capability, read)
    import mmgate.ops  # noqa: F401  (registers the operators)

    if op == 'ms_deform_attn':
        queries = sum(height * width for height, width in SHAPES)
        sampler(DTYPES[dtype], 1, queries, 8, dim, 2, SHAPES, POINTS)
    else:
        size = (None, (1, 1, 1, tokens), (1, 1, tokens, tokens), (1, 8, tokens, tokens))[bias]
        added = None if size is None else torch.empty(size)
        plug(DTYPES[dtype], tokens, tokens, 8, 1 if shared else 8, dim, width or dim, added)
    return found


def _listing(name: str, compiled: Any, constants: dict[str, Any], dtype: str, dim: int) -> Listing:
    if 'BLOCK_Q' in constants:  # the loop is over levels, and backward one over points in it
        block = f'{constants["BLOCK_Q"]} queries'
        unit = POINTS * constants['BLOCK_Q'] / constants['num_warps']
        rounds = POINTS
    else:
        block = f'{constants["BLOCK_N"]} x {constants["BLOCK_M"]}' + (' x 2 heads' if constants['PAIR'] else '')
        heads = 2 if constants['PAIR'] else 1
        unit = heads * constants['BLOCK_N'] * constants['BLOCK_M'] / (32 * constants['num_warps'])
        rounds = 1
    tool = Path(triton.__file__).parent / 'backends/nvidia/bin/cuobjdump'
    if not tool.exists():
        raise RuntimeError(f'{tool} does not exist: this Triton brings no disassembler.')
    with tempfile.NamedTemporaryFile(suffix='.cubin') as file:
        file.write(compiled.asm['cubin'])
        file.flush()
        usage, code = (
            subprocess.run([str(tool), option, file.name], capture_output=True, text=True, check=True).stdout
            for option in ('-res-usage', '-sass')
        )
    found = {key: int(value) for key, value in re.findall(r'(REG|STACK|LOCAL):(\d+)', usage)}
    instructions = [(int(at, 16), text) for at, text in re.findall(r'/\*([0-9a-f]{4,})\*/\s+([^;]*?)\s*;', code)]
    loop, inner = _main_loop(instructions)
    return Listing(
        kernel=name,
        dtype=dtype,
        dim=dim,
        block=block,
        registers=found['REG'],
        spilled=found['STACK'] + found['LOCAL'],
        shared=compiled.metadata.shared,
        instructions=round((len(loop) + (rounds - 1) * len(inner)) / unit, 1),
        special=round((_special(loop) + (rounds - 1) * _special(inner)) / unit, 2),
        barriers=sum(_opcode(text).startswith('BAR') for text in loop),
        hazards=hazards(instructions),
        in_flight=_in_flight(inner or loop),
        opcodes=dict(Counter(_opcode(text) for _, text in instructions)),
    )


def _special(loop: list[str]) -> int:
    return sum(_opcode(text).startswith('MUFU') for text in loop)


def _opcode(text: str) -> str:
    return re.sub(r'^@!?\w+\s+', '', text).split()[0]


def _main_loop(instructions: list[tuple[int, str]]) -> tuple[list[str], list[str]]:
    """Return the longest loop, from the target of a backward branch to the branch, and a loop inside of it."""
    loops = []
    for at, text in instructions:
        target = re.search(r'\bBRA\b.*?0x([0-9a-f]+)', text)
        if target and int(target[1], 16) < at:
            loops.append((int(target[1], 16), at))
    loops.sort(key=lambda loop: loop[0] - loop[1])
    first, last = loops[0] if loops else (0, -1)
    within = [loop for loop in loops[1:] if first < loop[0] and loop[1] < last]
    spans = [(first, last), *within[:1], (0, -1)][:2]
    main, inner = ([text for at, text in instructions if start <= at <= end] for start, end in spans)
    return main, inner


def _in_flight(loop: list[str]) -> float:
    load = re.compile(r'LDG\.E(?:\.(64|128))?\S* R(\d+),')
    found = [load.search(text) for text in loop]
    widest = max((int(match[1] or 32) for match in found if match), default=0)
    waiting: set[str] = set()
    loads = 0
    rounds = 0
    for text, match in zip(loop, found, strict=True):
        if waiting.intersection(re.findall(r'\bR\d+', text)):
            waiting = set()
            rounds = rounds + 1
        if match and int(match[1] or 32) == widest:
            waiting |= {f'R{int(match[2]) + i}' for i in range(widest // 32)}
            loads += 1
    return round(loads / max(rounds + bool(waiting), 1), 1)


def main() -> None:
    """Parse arguments, compile, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--op', choices=OPS, default=OPS[0])
    parser.add_argument('--dtype', choices=sorted(DTYPES), nargs='+', default=['fp32', 'bf16'])
    parser.add_argument('--dim', type=int, nargs='+', default=[16, 32, 64, 128], help='channels of a head')
    biases = 'of plug_attention: none, padding, full, full for each head'
    parser.add_argument('--bias', type=int, choices=[0, 1, 2, 3], default=0, help=biases)
    parser.add_argument('--width', type=int, help="channels of plug_attention's gate; default: those of a head")
    parser.add_argument('--gate', choices=['shared', 'per_head'], default='shared', help='of plug_attention')
    parser.add_argument('--tokens', type=int, default=TOKENS, help='of plug_attention')
    parser.add_argument(
        '--capability', type=int, choices=CAPABILITIES, default=CAPABILITY, help='of the GPU: 90 = sm_90'
    )
    parser.add_argument('--out', type=Path, help='JSON to write, with the count of every opcode')
    args = parser.parse_args()
    rows = []
    columns = ('kernel', 'dtype', 'channels', 'block', 'registers', 'bytes spilled', 'KiB shared', 'instructions')
    columns += ('special', 'in flight', 'hazards')
    print(f'| {" | ".join(columns)} |\n{"|---" * len(columns)}|')
    for dtype in args.dtype:
        for dim in args.dim:
            gate = args.gate == 'shared'
            for row in listings(args.op, dtype, dim, args.capability, args.bias, gate, args.tokens, args.width):
                rows.append(asdict(row))
                print(
                    f'| {row.kernel} | {dtype} | {dim} | {row.block} | {row.registers} | {row.spilled} '
                    f'| {row.shared / 1024:.0f} | {row.instructions} | {row.special} | {row.in_flight} '
                    f'| {len(row.hazards)} |',
                    flush=True,
                )
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1) + '\n')
        print(f'written to {args.out}')


if __name__ == '__main__':
    main()
