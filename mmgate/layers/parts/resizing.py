"""Positions of another resolution: encodings and biases resized to the shapes of the model that loads them."""

from __future__ import annotations

from math import prod, sqrt

import torch
import torch.nn.functional as F
from torch import Tensor


def resize_axis(x: Tensor, axis: int, size: int) -> Tensor:
    """Return ``x`` with ``axis`` resized linearly to ``size``, as a forward pass on a larger map would resize it."""
    if x.shape[axis] == size:
        return x
    lines = x.movedim(axis, -1)
    resized = F.interpolate(_computable(lines).reshape(1, -1, lines.shape[-1]), size=size, mode='linear')
    return resized.view(*lines.shape[:-1], size).movedim(-1, axis).to(x.dtype).contiguous()


def resize_grid(x: Tensor, size: tuple[int, int], mode: str = 'bilinear') -> Tensor:
    """Return ``(1, N, C)`` of a grid, row by row, as ``(1, h w, C)``.

    A checkpoint does not hold the shape of its grid. N cells are taken for ``size`` itself where it has as many, else
    for the square or for the grid in proportion to ``size`` that has. Where there is neither, or both and they differ,
    ``x`` is returned as it is: loading it will name its shape.
    """
    if x.dim() != 3 or x.shape[1] == prod(size):
        return x
    cells = x.shape[1]
    shapes = {tuple(round(side * sqrt(cells / prod(sides))) for side in sides) for sides in ((1, 1), size)}
    fitting = [shape for shape in shapes if prod(shape) == cells]
    if len(fitting) != 1:
        return x
    grid = _computable(x).transpose(1, 2).unflatten(-1, fitting[0])
    return F.interpolate(grid, size=size, mode=mode).flatten(2).transpose(1, 2).to(x.dtype).contiguous()


def _computable(x: Tensor) -> Tensor:
    """Not every torch resizes half precision on a CPU."""
    return x if x.dtype == torch.float64 else x.float()
