"""Resize the position encodings and biases of a checkpoint to the shapes of the model that loads it."""

from __future__ import annotations

from math import prod, sqrt

import torch
import torch.nn.functional as F
from torch import Tensor


def resize_axis(x: Tensor, axis: int, size: int) -> Tensor:
    """Resize one axis of a tensor linearly to ``size``, as a forward pass does for another map."""
    if x.shape[axis] == size:
        return x
    lines = x.movedim(axis, -1)
    resized = F.interpolate(_computable(lines).reshape(1, -1, lines.shape[-1]), size=size, mode='linear')
    return resized.view(*lines.shape[:-1], size).movedim(-1, axis).to(x.dtype).contiguous()


def resize_grid(x: Tensor, size: tuple[int, int], mode: str = 'bilinear') -> Tensor:
    """Resize a grid of values ``(1, N, C)``, listed row by row, to height and width ``size``: ``(1, h w, C)``.

    A checkpoint does not hold the height and width of its grid. If ``size`` has N cells, nothing is resized. Otherwise
    a square of N cells is assumed, or a grid of N cells with the proportions of ``size``. If neither exists, or both
    and they differ, ``x`` is returned as it is, and loading it fails with a message that names its shape.
    """
    if x.dim() != 3 or x.shape[1] == prod(size):
        return x
    cells = x.shape[1]
    shapes: set[tuple[int, ...]] = set()
    for proportions in ((1, 1), size):
        factor = sqrt(cells / prod(proportions))
        shapes.add(tuple(round(side * factor) for side in proportions))
    fitting = [shape for shape in shapes if prod(shape) == cells]
    if len(fitting) != 1:
        return x
    grid = _computable(x).transpose(1, 2).unflatten(-1, fitting[0])
    return F.interpolate(grid, size=size, mode=mode).flatten(2).transpose(1, 2).to(x.dtype).contiguous()


def _computable(x: Tensor) -> Tensor:
    """Convert a 16-bit tensor to float32, because not every torch can resize 16 bits on a CPU."""
    return x if x.dtype == torch.float64 else x.float()
