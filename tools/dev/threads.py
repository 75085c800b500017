"""Calls of the CPU kernels that start threads, for a thread sanitizer; see sanitize.sh."""

from __future__ import annotations

import torch

from mmgate.ops import native as library
from mmgate.ops.deformable import ms_deform_attn
from mmgate.ops.dense.chunked import gated_softmax, gated_softmax_backward
from mmgate.ops.native import why_not_native


def sample() -> None:
    """Run the sampler with fewer and more threads than heads, on few and on many queries."""
    shapes = torch.tensor([(12, 16), (6, 8)])
    starts = torch.tensor([0, 192])
    for threads in (2, 5):
        for queries in (20, 300):
            value = torch.randn(1, 240, 3, 16)
            logits = torch.randn(1, queries, 3, 2, 4)
            leaves = [value, torch.rand(*logits.shape, 2), logits, torch.randn(1, queries, 3, 2, 1)]
            value, points, logits, gate = (x.requires_grad_() for x in leaves)
            torch.set_num_threads(threads)
            output = ms_deform_attn(value, shapes, starts, points, logits, gate, backend='native')
            output.sum().backward()


def attend() -> None:
    """Run the gated softmax with fewer and more threads than rows, for a shared gate and one of each head."""
    for threads in (2, 5):
        for rows in (4, 40):
            for gate_heads in (1, 3):
                logits = torch.randn(1, 3, rows, 2000)
                factor = torch.randn(1, gate_heads, rows, 2000)
                torch.set_num_threads(threads)
                bias = torch.randn(1, 3, 1, 2000)
                # The factor is formed in its place.
                scalars = (0.5, -0.2, 1.0, 0.1)
                weights = gated_softmax(logits, factor, bias, torch.empty_like(logits), scalars, by_loop=True)
                grad = torch.randn_like(logits)
                delta = (grad * weights).sum(-1, keepdim=True)
                gated_softmax_backward(logits, factor, weights, grad, delta, by_loop=True)


def main() -> None:
    """Run both kernels on threads that they start."""
    library.OWN_THREADS = True
    assert why_not_native(torch.empty(0)) is None, why_not_native(torch.empty(0))
    sample()
    attend()
    print('no two threads met')


if __name__ == '__main__':
    main()
