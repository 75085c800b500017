"""Split the tokens of a map into windows or stripes, and merge them again."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def split_stripes(x: Tensor, hw_shape: tuple[int, int], stripe: tuple[int, int]) -> Tensor:
    """Split a map's tokens ``(B, h w, C)`` into windows or stripes ``(B n, sh sw, C)``; each has sh rows, sw columns.

    The n stripes of one image follow one another along the first axis.

    The map is padded with zeros, below and on the right, to whole stripes.

    Args:
        x: Tokens ``(B, h w, C)``.
        hw_shape: Height h and width w of the map.
        stripe: Height sh and width sw of a stripe or window.
    """
    height, width = hw_shape
    rows, columns = stripe
    x = F.pad(x.unflatten(1, hw_shape), (0, 0, 0, -width % columns, 0, -height % rows))
    x = x.unflatten(2, (-1, columns)).unflatten(1, (-1, rows))  # (B, n rows, sh, n columns, sw, C)
    return x.transpose(2, 3).flatten(0, 2).flatten(1, 2)


def merge_stripes(x: Tensor, hw_shape: tuple[int, int], stripe: tuple[int, int]) -> Tensor:
    """Merge windows or stripes ``(B n, sh sw, C)`` into the map's tokens ``(B, h w, C)``, and cut the padding off.

    The arguments are as in :func:`split_stripes`.
    """
    height, width = hw_shape
    rows, columns = stripe
    grid = (-(-height // rows), -(-width // columns))
    x = x.reshape(-1, *grid, rows, columns, x.shape[-1]).transpose(2, 3)  # (B, n rows, sh, n columns, sw, C)
    return x.flatten(3, 4).flatten(1, 2)[:, :height, :width].flatten(1, 2)
