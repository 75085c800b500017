"""SwiGLU feed-forward network."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class SwiGLU(nn.Module):
    """``project(silu(a) * b)`` with ``[a; b] = expand(x)``, and one or two dropouts.

    Args:
        embed_dims: Channels C.
        expansion: Channels after the first layer over C, 2 or 4 in the paper; the activation halves them.
        dropouts: 1, after the activation, or 2, after the projection, too.
        drop: Probability of both.
        drop_path: Applied to the output before ``identity`` is added.

    Raises:
        ValueError: Another number of dropouts, or channels that cannot be halved.

    Source: M-DGSA, sections 4.3 and 5.1, Table 1; GLU variants improve transformer (Shazeer, 2020).
    """

    def __init__(
        self,
        embed_dims: int,
        expansion: float = 4,
        *,
        dropouts: int = 2,
        drop: float = 0.0,
        drop_path: nn.Module | None = None,
    ) -> None:
        super().__init__()
        hidden = round(embed_dims * expansion)
        if dropouts not in (1, 2):
            raise ValueError(f'dropouts={dropouts} must be 1 or 2.')
        if hidden < 2 or hidden % 2:
            raise ValueError(
                f'expansion={expansion} makes {hidden} channels of {embed_dims}; it has to be an even number.'
            )
        self.expand, self.project = nn.Linear(embed_dims, hidden), nn.Linear(hidden // 2, embed_dims)
        self.drop = nn.Dropout(drop)
        self.out_drop = nn.Dropout(drop) if dropouts == 2 else nn.Identity()
        self.drop_path = nn.Identity() if drop_path is None else drop_path

    def forward(self, x: Tensor, identity: Tensor | None = None) -> Tensor:
        """Return ``identity`` (``x`` by default) plus the network's output for tokens ``(B, N, C)``."""
        gate, value = self.expand(x).chunk(2, -1)
        out = self.out_drop(self.project(self.drop(F.silu(gate) * value)))
        return (x if identity is None else identity) + self.drop_path(out)
