"""Cut the tokens of a map into windows or stripes, and put them together again."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def split_stripes(x: Tensor, hw_shape: tuple[int, int], stripe: tuple[int, int]) -> Tensor:
    """Return tokens ``(B, h w, C)`` as ``(B n, sh sw, C)``: the n stripes of an image next to each other.

    The map of ``hw_shape`` is padded with zeros, below and on the right, to whole stripes.
    """
    (height, width), (rows, columns) = hw_shape, stripe
    x = F.pad(x.unflatten(1, hw_shape), (0, 0, 0, -width % columns, 0, -height % rows))
    x = x.unflatten(2, (-1, columns)).unflatten(1, (-1, rows))  # (B, n rows, sh, n columns, sw, C)
    return x.transpose(2, 3).flatten(0, 2).flatten(1, 2)


def merge_stripes(x: Tensor, hw_shape: tuple[int, int], stripe: tuple[int, int]) -> Tensor:
    """Return stripes ``(B n, sh sw, C)`` as the tokens ``(B, h w, C)`` of the map, without its padding."""
    (height, width), (rows, columns) = hw_shape, stripe
    grid = (-(-height // rows), -(-width // columns))
    x = x.reshape(-1, *grid, rows, columns, x.shape[-1]).transpose(2, 3)  # (B, n rows, sh, n columns, sw, C)
    return x.flatten(3, 4).flatten(1, 2)[:, :height, :width].flatten(1, 2)
