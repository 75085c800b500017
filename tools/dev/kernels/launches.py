"""Compile the launches of the Triton backends for a GPU, without a GPU and without running them.

    python tools/dev/kernels/launches.py 90

Triton makes constants of integers that are 1, and compiles for integers that 16 divides and for aligned pointers, which
its interpreter does not. This script calls the operators, and Triton's launcher compiles. A kernel keeps the first GPU
that it was compiled for, so that a process compiles for one GPU. It prints kernel and GPU of each launch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

from mmgate.ops.triton_backend import interpreted


class Driver:
    """The part of a Triton driver that compilation needs."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        """Return the GPU for which to compile."""
        return GPUTarget('cuda', self.capability, 32)

    def get_current_device(self) -> int:
        """Return the number of the GPU."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Return the stream of launches."""
        return 0


def compile_for(capability: int, compiled: Callable[[str, Any, dict[str, Any]], None]) -> None:
    """Compile launches in this process for ``capability``, and pass on name, kernel and constants of each.

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
            compiled(name, result, options)

        return launch

    driver.set_active(Driver(capability))
    JITFunction.__getitem__ = prepare


def sampler(
    dtype: torch.dtype, batch: int, queries: int, heads: int, dim: int, reference: int, shapes: Any, points: int
) -> None:
    """Call the sampler and its gradient, on tensors of arbitrary values."""
    spatial_shapes = torch.tensor(shapes)
    areas = spatial_shapes.prod(1)
    samples = batch, queries, heads, len(shapes), points

    def leaf(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, requires_grad=True)

    output, _ = torch.ops.mmgate.ms_deform_attn_fused(
        leaf(batch, int(areas.sum()), heads, dim),
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
    dtype: torch.dtype, rows: int, columns: int, heads: int, gates: int, dim: int, width: int, bias: Tensor | None
) -> None:
    """Call PLuG attention and its gradient, on tensors of arbitrary values."""
    shapes = [(heads, rows, dim), (heads, columns, dim), (heads, columns, dim)]
    shapes += [(gates, rows, width), (gates, columns, width)]
    leaves = [torch.empty(1, *shape, dtype=dtype, requires_grad=True) for shape in shapes]
    output, _ = torch.ops.mmgate.plug_attention_fused(*leaves, torch.empty(4, requires_grad=True), bias)
    output.sum().backward()


def main() -> None:
    """Compile launches of odd sizes."""
    capability = int(sys.argv[1])
    compile_for(capability, lambda name, kernel, _: print(name, kernel.metadata.target.arch, flush=True))
    import mmgate.ops  # noqa: F401  (registers the operators)

    sampler(torch.float16, 2, 77, 8, 32, 4, [(6, 5), (3, 3)], 3)
    sampler(torch.float32, 1, 1, 1, 20, 0, [(1, 1)], 3)
    plug(torch.float16, 70, 100, 4, 1, 32, 32, torch.zeros(1, 1, 1, 100))
    plug(torch.bfloat16, 64, 128, 2, 1, 32, 32, torch.zeros(64, 128)[None, None])  # two heads a program
    plug(torch.bfloat16, 70, 100, 3, 1, 32, 32, torch.zeros(1, 3, 70, 100))
    plug(torch.float32, 1, 1, 1, 1, 24, 32, None)


if __name__ == '__main__':
    main()
