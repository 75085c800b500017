"""Adaptive average pooling as two products of matrices, for graphs of any size: ONNX has no operator for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .replaced import replaced


def adaptive_avg_pool2d(x: Tensor, output_size: Any) -> Tensor:
    """Return what :func:`torch.nn.functional.adaptive_avg_pool2d` returns for maps ``(..., H, W)``."""
    height, width = (output_size, output_size) if isinstance(output_size, int) else output_size
    rows = _means(x.shape[-2] if height is None else height, x.shape[-2], x)
    columns = _means(x.shape[-1] if width is None else width, x.shape[-1], x)
    return rows @ x @ columns.t()


def _means(cells: Any, size: Any, like: Tensor) -> Tensor:
    """Return a matrix ``(c, s)`` whose row i averages the pixels from ``floor(i s / c)`` to ``ceil((i + 1) s / c)``."""
    cell = torch.arange(cells, device=like.device)[:, None]
    pixel = torch.arange(size, device=like.device)
    inside = (pixel >= cell * size // cells) & (pixel < -(-(cell + 1) * size // cells))
    return inside.to(like.dtype) / inside.sum(1, keepdim=True)


@contextmanager
def matrix_pooling() -> Iterator[None]:
    """Let torch's adaptive average pooling be this one."""
    with replaced(F, 'adaptive_avg_pool2d', adaptive_avg_pool2d):
        yield
