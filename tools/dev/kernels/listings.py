"""What the assembler makes of the Triton kernels: registers, spills, instructions. Needs Triton, but no GPU.

Counts are not times. They say what a kernel asks of a multiprocessor, and they are the same on every machine.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmgate.ops.ms_deform_attn import triton as sampler
from mmgate.ops.plug_attention import blocks as plug
from mmgate.ops.triton_backend import interpreted

from .warpgroups import hazards

ITEMSIZE = {'fp32': 4, 'fp16': 2, 'bf16': 2}
CAPABILITIES = (80, 86, 89, 90, 120)  # Ampere, Ada, Hopper and Blackwell; 86, 89 and 120 are what is on a desk
CAPABILITY = 90
SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 120: 99}  # KiB of shared memory that a program may have
LEVELS = POINTS = 4
OPS = ('ms_deform_attn', 'plug_attention')


@dataclass(frozen=True)
class Listing:
    """One compiled kernel.

    Attributes:
        kernel: Its name.
        dtype: Of the inputs: ``'fp32'``, ``'fp16'`` or ``'bf16'``.
        dim: Channels of a head (and of the gate).
        block: What a program works on: queries; or rows, columns and heads.
        registers: A thread's.
        spilled: Bytes a thread has on the stack.
        shared: Bytes of shared memory a program has.
        instructions: Of a warp in the main loop, for one sample of one query (``ms_deform_attn``) or for 32 elements of
            the map (``plug_attention``).
        special: Of these, those of the special-function units (MUFU: exponentials, tanh, reciprocals), of which a
            multiprocessor starts one in two cycles.
        barriers: Barriers in the main loop.
        hazards: Instructions that touch registers of warpgroup products in flight; none if the assembler is right.
        in_flight: Of the widest loads of the main loop, or of the loop in it, how many on average are issued before the
            numbers of one of them are used.
        opcodes: Opcodes of the whole kernel with their modifiers, and how many there are.
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
    op: str, dtype: str, dim: int, bias: int = 0, capability: int = CAPABILITY, shared: bool = True
) -> Iterator[Listing]:
    """Compile an operator's kernels as they are launched on a GPU and read the listings.

    Args:
        op: One of :data:`OPS`.
        dtype: A key of :data:`ITEMSIZE`.
        dim: Channels of a head: 16, 32, 64 or 128.
        bias: Of ``plug_attention``: 0 for none, 1 for one of all rows (padding), 2 for a full one.
        capability: Of the GPU, one of :data:`CAPABILITIES`.
        shared: Of ``plug_attention``: pairs of heads share their gate and their bias.

    Raises:
        RuntimeError: Triton's interpreter is on, or this Triton brings no disassembler.
    """
    if interpreted():
        raise RuntimeError('TRITON_INTERPRET=1 interprets kernels; unset it to compile them.')
    of_sampler = op == 'ms_deform_attn'
    yield from _sampler(dtype, dim, capability) if of_sampler else _plug(dtype, dim, bias, capability, shared)


def _sampler(dtype: str, dim: int, capability: int) -> Iterator[Listing]:
    from mmgate.ops.ms_deform_attn.backward_kernel import backward_kernel
    from mmgate.ops.ms_deform_attn.kernels import forward_kernel

    warps = sampler.NUM_WARPS
    for backward, kernel in enumerate((forward_kernel, backward_kernel)):
        split = sampler.split_of(dim, ITEMSIZE[dtype], bool(backward), bool(backward) and capability < 90)
        constants = dict(LEVELS=LEVELS, POINTS=POINTS, PADDED=LEVELS * POINTS, D=dim, REFERENCE=2, TILED=True)
        constants |= dict(GATED=True, RESIDUAL=True, POST=False, gate_p=0) | split.constants(warps)
        del constants['num_warps']
        if backward:
            constants |= dict(SCATTER=True, GRAD_REFERENCE=False)
        types = dict.fromkeys(('shapes_ptr', 'starts_ptr'), '*i64') | {'order_ptr': '*i32'}
        types |= dict.fromkeys(('lse_ptr', 'grad_value_ptr', 'grad_reference_ptr', 'grad_gate_ptr'), '*fp32')
        unit = POINTS * split.queries  # the loop is over levels, and backward one over points in it
        block = f'{constants["BLOCK_Q"]} queries'
        yield _listing(kernel, dtype, dim, block, constants, types, warps, 1, unit, capability, POINTS)


def _plug(dtype: str, dim: int, bias: int, capability: int, shared: bool) -> Iterator[Listing]:
    from mmgate.ops.plug_attention import kernels

    warps = plug.NUM_WARPS
    wide = ('scalars_ptr', 'lse_ptr', 'delta_ptr', 'bias_ptr', 'grad_gq_ptr', 'grad_gk_ptr', 'grad_scalars_ptr')
    for name in plug.BLOCKS[ITEMSIZE[dtype]]:
        blocks = plug.blocks_of(name, ITEMSIZE[dtype], dim, bias == 2, shared, capability)
        constants: dict[str, Any] = dict(D=dim, E=dim, BLOCK_D=dim, BLOCK_E=dim, PAIR=blocks.pair)
        constants |= dict(BLOCK_N=blocks.rows, BLOCK_M=blocks.columns)
        constants |= dict(BIASED=bias, ONE_BIAS=True, EVEN=True, FAST_TANH=dtype != 'fp32', INTERPRETED=False)
        types = dict.fromkeys(wide, '*fp32')
        heads = 2 if blocks.pair else 1
        unit = heads * blocks.rows * blocks.columns / (32 * warps)
        kernel = getattr(kernels, name)
        block = f'{blocks.rows} x {blocks.columns}' + (' x 2 heads' if blocks.pair else '')
        yield _listing(kernel, dtype, dim, block, constants, types, warps, blocks.stages, unit, capability)


def _listing(
    kernel: Any,
    dtype: str,
    dim: int,
    block: str,
    constants: dict[str, Any],
    types: dict[str, str],
    warps: int,
    stages: int,
    unit: float,
    capability: int,
    rounds: int = 1,
) -> Listing:
    import triton
    from triton.backends.compiler import GPUTarget

    signature, aligned = {}, {}
    for index, name in enumerate(kernel.arg_names):
        pointer = name.endswith('_ptr')
        other = '*' + dtype if pointer else 'fp32' if name.endswith('scale') else 'i32'
        signature[name] = 'constexpr' if name in constants else types.get(name, other)
        if pointer:
            aligned[(index,)] = [['tt.divisibility', 16]]  # as torch's are
    source = triton.compiler.ASTSource(kernel, signature, constants, aligned)
    options = dict(num_warps=warps, num_stages=stages, enable_fp_fusion=True)
    compiled = triton.compile(source, target=GPUTarget('cuda', capability, 32), options=options)
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
        kernel=kernel.__name__,
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
    """Return what lies between the target of a backward branch and the branch: the longest such loop, and one in it."""
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
    loads, rounds = 0, 0
    for text, match in zip(loop, found, strict=True):
        if waiting.intersection(re.findall(r'\bR\d+', text)):
            waiting, rounds = set(), rounds + 1
        if match and int(match[1] or 32) == widest:
            waiting |= {f'R{int(match[2]) + i}' for i in range(widest // 32)}
            loads += 1
    return round(loads / max(rounds + bool(waiting), 1), 1)
