"""Compile the Triton kernels for a GPU without one, and print registers, spills and shared memory of each launch.

    python tools/dev/compile_kernels.py 90 sampler-bf16 plug-bf16

Triton makes constants of integers that are 1, and compiles for integers that 16 divides and for aligned pointers, which
its interpreter does not. This script calls the operators, and Triton's launcher compiles. A kernel keeps the first GPU
that it was compiled for, so that a process compiles for one GPU. ``odd`` are calls of odd sizes.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

import mmgate.ops  # noqa: F401  (registers the operators)
from mmgate.ops.triton_backend import interpreted

ENCODER = ((100, 167), (50, 84), (25, 42), (13, 21))  # levels of an image of 800 x 1333


def compile_for(capability: int, compiled: Callable[[str, Any], None]) -> None:
    """Compile launches in this process for ``capability``, and pass on name and kernel of each.

    Raises:
        RuntimeError: Triton's interpreter is on, or a kernel was compiled for another GPU or without multiply-add.
    """
    if interpreted():
        raise RuntimeError('TRITON_INTERPRET=1 interprets kernels; unset it to compile them.')

    def prepare(kernel: JITFunction, grid: Any) -> Any:
        def launch(*args: Any, **options: Any) -> None:
            result = kernel.warmup(*args, grid=grid, **options)
            name = kernel.__name__
            if result.metadata.target.arch != capability:
                raise RuntimeError(f'{name} is for {result.metadata.target.arch}: a process compiles for one GPU.')
            if options.get('enable_fp_fusion') is not True:  # what Triton 3.10 turned off by default
                raise RuntimeError(f'{name} is launched without fused multiply-add.')
            compiled(name, result)

        return launch

    target = GPUTarget('cuda', capability, 32)
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=lambda device: 0
        )
    )
    JITFunction.__getitem__ = prepare


def usage(compiled: Any) -> dict[str, int]:
    """Return the registers and the spilled bytes of a thread of a kernel, and the shared memory of a program."""
    tool = Path(triton.__file__).parent / 'backends/nvidia/bin/cuobjdump'
    with tempfile.NamedTemporaryFile(suffix='.cubin') as file:
        file.write(compiled.asm['cubin'])
        file.flush()
        done = subprocess.run([str(tool), '-res-usage', file.name], capture_output=True, text=True, check=True)
    found = {key: int(value) for key, value in re.findall(r'(REG|STACK|LOCAL):(\d+)', done.stdout)}
    return dict(registers=found['REG'], spilled=found['STACK'] + found['LOCAL'], shared=compiled.metadata.shared)


def sampler(
    dtype: torch.dtype,
    dim: int = 32,
    *,
    batch: int = 1,
    heads: int = 8,
    queries: int | None = None,
    reference: int = 2,
    shapes: Any = ENCODER,
    points: int = 4,
) -> None:
    """Call the sampler and its gradient, on tensors of arbitrary values; by default an encoder's."""
    spatial_shapes = torch.tensor(shapes)
    areas = spatial_shapes.prod(1)
    tokens = int(areas.sum())
    queries = queries or tokens
    samples = batch, queries, heads, len(shapes), points

    def leaf(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, requires_grad=True)

    output, _ = torch.ops.mmgate.ms_deform_attn_fused(
        leaf(batch, tokens, heads, dim),
        spatial_shapes,
        areas.cumsum(0) - areas,
        leaf(*samples, 2),
        leaf(*samples),
        leaf(*samples[:4], 1) if reference else None,
        True,
        'pre_softmax',
        # an encoder's points need no gradient, boxes that a decoder refines do
        leaf(batch, queries, len(shapes), reference).detach().requires_grad_(reference == 4) if reference else None,
        None,  # every level has as many points
    )
    output.sum().backward()


def plug(
    dtype: torch.dtype,
    dim: int = 32,
    *,
    rows: int = 4096,
    columns: int = 4096,
    heads: int = 8,
    gates: int = 1,
    width: int = 32,
    bias: tuple[int, ...] | None = None,
) -> None:
    """Call PLuG attention and its gradient, on tensors of arbitrary values."""
    shapes = [(heads, rows, dim), (heads, columns, dim), (heads, columns, dim)]
    shapes += [(gates, rows, width), (gates, columns, width)]
    leaves = [torch.empty(1, *shape, dtype=dtype, requires_grad=True) for shape in shapes]
    added = None if bias is None else torch.empty(bias)
    output, _ = torch.ops.mmgate.plug_attention_fused(*leaves, torch.empty(4, requires_grad=True), added)
    output.sum().backward()


def odd_sizes() -> None:
    """Call both operators at odd sizes and at sizes that are 1."""
    sampler(torch.float16, batch=2, queries=77, reference=4, shapes=[(6, 5), (3, 3)], points=3)
    sampler(torch.float32, 20, queries=1, heads=1, reference=0, shapes=[(1, 1)], points=3)
    plug(torch.float16, rows=70, columns=100, heads=4, bias=(1, 1, 1, 100))
    plug(torch.bfloat16, rows=64, columns=128, heads=2, bias=(1, 1, 64, 128))  # two heads a program
    plug(torch.bfloat16, rows=70, columns=100, heads=3, bias=(1, 3, 70, 100))
    plug(torch.float32, 24, rows=1, columns=1, heads=1)


CALLS: dict[str, Callable[[], None]] = {
    'odd': odd_sizes,
    'sampler-fp32': partial(sampler, torch.float32),
    'sampler-bf16': partial(sampler, torch.bfloat16),
    'sampler-64': partial(sampler, torch.float32, 64),
    'plug-fp32': partial(plug, torch.float32),
    'plug-bf16': partial(plug, torch.bfloat16),
    'plug-narrow-gate': partial(plug, torch.bfloat16, 128, bias=(1, 8, 4096, 4096)),
    'plug-widest-fp32': partial(plug, torch.float32, 128, width=128),
    'plug-widest-bf16': partial(plug, torch.bfloat16, 128, width=128, bias=(1, 1, 4096, 4096)),
}


def main() -> None:
    """Parse arguments, compile, and print a line of JSON for each launch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('capability', type=int, help='of the GPU: 90 = sm_90')
    parser.add_argument('calls', nargs='*', default=[], metavar='CALL', help=f'default: all of {", ".join(CALLS)}')
    args = parser.parse_args()
    for call in args.calls or CALLS:

        def tell(name: str, kernel: Any, call: str = call) -> None:
            print(json.dumps(dict(call=call, kernel=name, **usage(kernel))), flush=True)

        compile_for(args.capability, tell)
        CALLS[call]()


if __name__ == '__main__':
    main()
