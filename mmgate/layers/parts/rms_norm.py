"""RMSNorm, which torch has had since 2.4."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class _RMSNorm(nn.Module):
    """What ``torch.nn.RMSNorm`` over the last dimension computes, under its parameter's name.

    Args:
        dim: Size of the last dimension.
        eps: Added to the mean of the squares.
    """

    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` over its root mean square, times the weight; 16 bits are widened in between."""
        wide = x.float() if x.dtype.itemsize < 4 else x
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * self.weight).type_as(x)


RMSNorm: type[nn.Module] = getattr(nn, 'RMSNorm', _RMSNorm)
