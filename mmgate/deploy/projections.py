"""The projections of torch's attention without questions about layouts, whose answers would settle the batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from .replaced import replaced


def project(q: Tensor, k: Tensor, v: Tensor, w: Tensor, b: Tensor | None = None) -> list[Tensor]:
    """Return query, key and value projected by the thirds of ``w`` ``(3 C, C)`` and ``b`` ``(3 C,)``."""
    biases = (None,) * 3 if b is None else b.chunk(3)
    inputs = [x.clone(memory_format=torch.contiguous_format) for x in (q, k, v)]  # whose layout is known
    return [F.linear(x, weight, bias) for x, weight, bias in zip(inputs, w.chunk(3), biases, strict=True)]


@contextmanager
def plain_projections() -> Iterator[None]:
    """Let torch's ``multi_head_attention_forward`` project by :func:`project`."""
    with replaced(F, '_in_projection_packed', project):
        yield
