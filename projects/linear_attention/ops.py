"""What several of the attentions compute with: unit vectors, wider numbers, rotary positions of a map."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """Convert a 16-bit tensor to float32; return any other tensor as it is."""
    return x.float() if x.dtype.itemsize < 4 else x


def unit(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Normalise ``x`` to length 1 along the last axis; the result has ``dtype``, by default that of ``x``.

    The gradient grows with the inverse of the length. F.normalize allows lengths down to 1e-12, whose inverse is
    infinite in half precision. There a vector shorter than 1e-4 becomes 0 and gets no gradient.
    """
    dtype = x.dtype if dtype is None else dtype
    if dtype != torch.float16:
        return F.normalize(wide(x), dim=-1).to(dtype)
    length = wide(x).norm(dim=-1, keepdim=True)
    return (wide(x) * torch.where(length > 1e-4, 1 / length.clamp(min=1e-4), 0)).to(dtype)


def rotate(x: Tensor, hw_shape: tuple[int, int], class_tokens: int = 0, *, inclusive: bool = False) -> Tensor:
    """Apply rotary positions to tokens of a map: half of the pairs of channels rotate by the row, half by the column.

    Args:
        x: Tokens ``(..., class_tokens + h w, d)``, the map's row by row; ``d`` is a multiple of 4.
        hw_shape: Height h and width w of the map.
        class_tokens: Number of tokens before the map's, which stay as they are.
        inclusive: True makes the slowest pair exactly 1 / 10000 of the fastest, as in RALA; False leaves it one step
            faster, as in MLLA.

    Source: RoFormer (Su et al., 2021), over two axes as in MLLA (Han et al., 2024).
    """
    height, width = hw_shape
    pairs = x.shape[-1] // 4  # for each axis
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    steps = torch.arange(pairs, device=x.device, dtype=dtype) / (max(pairs - 1, 1) if inclusive else pairs)
    speeds = 10_000.0**-steps
    rows = torch.arange(height, device=x.device, dtype=dtype)[:, None] * speeds
    columns = torch.arange(width, device=x.device, dtype=dtype)[:, None] * speeds
    by_row = rows[:, None].expand(height, width, pairs)
    by_column = columns[None].expand(height, width, pairs)
    angles = torch.cat([by_row, by_column], -1).flatten(0, 1)  # (N, d / 2)
    cosine = angles.cos()
    sine = angles.sin()
    even, odd = wide(x[..., class_tokens:, :]).unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([even * cosine - odd * sine, even * sine + odd * cosine], -1).flatten(-2).to(x.dtype)
    return torch.cat([x[..., :class_tokens, :], turned], -2)
