"""Compile what the Triton backends launch, for GPUs and without one, and run none of it.

Triton takes integers that are 1 and pointers that are aligned for constants of a kernel, which its interpreter does
not. Run without TRITON_INTERPRET and with capabilities (80 90 ...); prints the kernels, one a launch.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

from mmgate.ops.ms_deform_attn import triton as fused
from mmgate.ops.triton_backend import capability_of


class Driver:
    """What compiling asks of a driver."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget('cuda', self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_only(kernel: JITFunction, grid: Any) -> Any:
    def launch(*args: Any, **options: Any) -> None:
        # what Triton 3.10 turned off by default
        assert options['enable_fp_fusion'] is True, f'{kernel.__name__} is launched without fused multiply-add'
        compiled = kernel.warmup(*args, grid=grid, **options)
        assert 'cubin' in compiled.asm
        print(kernel.__name__)

    return launch


def sampler(dtype: torch.dtype, batch: int, queries: int, heads: int, dim: int, reference: int, shapes: Any) -> None:
    spatial_shapes = torch.tensor(shapes)
    areas = spatial_shapes.prod(1)
    samples = batch, queries, heads, len(shapes), 3

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype, requires_grad=True)

    output, _ = torch.ops.mmgate.ms_deform_attn_fused(
        leaf(batch, int(areas.sum()), heads, dim),
        spatial_shapes,
        areas.cumsum(0) - areas,
        leaf(*samples, 2),
        leaf(batch, queries, len(shapes), reference) if reference else None,
        leaf(*samples),
        leaf(*samples[:4], 1) if reference else None,
        True,
        False,
    )
    output.sum().backward()


def plug(dtype: torch.dtype, rows: int, columns: int, heads: int, gates: int, dim: int, bias: Tensor | None) -> None:
    shapes = (heads, rows, dim), (heads, columns, dim), (heads, columns, dim), (gates, rows, 32), (gates, columns, 32)
    leaves = [torch.randn(1, *shape, dtype=dtype, requires_grad=True) for shape in shapes]
    output, _ = torch.ops.mmgate.plug_attention_fused(*leaves, torch.randn(4, requires_grad=True), bias)
    output.sum().backward()


if __name__ == '__main__':
    JITFunction.__getitem__ = compile_only
    for capability in map(int, sys.argv[1:]):
        driver.set_active(Driver(capability))
        fused.scalar_reductions.cache_clear()
        capability_of.cache_clear()
        sampler(torch.float16, 2, 77, 8, 32, 4, [(6, 5), (3, 3)])
        sampler(torch.float32, 1, 1, 1, 20, 0, [(1, 1)])
        plug(torch.float16, 70, 100, 4, 1, 32, torch.zeros(1, 1, 1, 100))
        plug(torch.bfloat16, 64, 128, 2, 1, 32, torch.zeros(64, 128)[None, None])  # two heads a program
        plug(torch.bfloat16, 70, 100, 3, 1, 32, torch.zeros(1, 3, 70, 100))
        plug(torch.float32, 1, 1, 1, 1, 24, None)
