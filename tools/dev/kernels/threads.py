"""Calls of the CPU kernel that start its threads, forward and backward, for a thread sanitizer; see ../sanitize.sh."""

from __future__ import annotations

import torch

from mmgate.ops import native as library
from mmgate.ops.ms_deform_attn import ms_deform_attn, native


def main() -> None:
    """Run calls with fewer and more threads than heads, of few and of many queries."""
    library.OWN_THREADS = True
    assert native.why_not(torch.empty(0)) is None, native.why_not(torch.empty(0))
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
    print('no two threads met')


if __name__ == '__main__':
    main()
