"""RMSNorm, for torch below 2.4, too."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class _RMSNorm(nn.Module):
    """Root mean square norm over the last dimension, with the parameter of ``torch.nn.RMSNorm``, which torch 2.4 added.

    Args:
        dim: Size of the last dimension.
        eps: Number that is added to the mean of the squares.
    """

    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` divided by its root mean square and multiplied by the weight; 16 bits are computed in 32."""
        wide = x.float() if x.dtype.itemsize < 4 else x
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * self.weight).type_as(x)


RMSNorm: type[nn.Module] = getattr(nn, 'RMSNorm', _RMSNorm)
