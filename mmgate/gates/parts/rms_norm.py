"""RMSNorm: torch's class or, below torch 2.4, which lacks it, our replacement."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class _RMSNorm(nn.Module):
    """RMSNorm over the last dimension, with the parameter of ``torch.nn.RMSNorm``, for torch below 2.4.

    Args:
        dim: Size of the last dimension.
        eps: Number that is added to the mean of the squares.
    """

    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Divide ``x`` by its root mean square and multiply it by the weight; 16-bit inputs are computed in float32."""
        wide = x.float() if x.dtype.itemsize < 4 else x
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * self.weight).type_as(x)


RMSNorm: type[nn.Module] = getattr(nn, 'RMSNorm', _RMSNorm)
