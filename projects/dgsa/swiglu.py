"""The SwiGLU feed-forward network, whose hidden layer is gated by SiLU."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from mmgate import ConfigError


class SwiGLU(nn.Module):
    """SwiGLU feed-forward network: ``project(silu(a) * b)`` with ``[a; b] = expand(x)``.

    Args:
        embed_dims: Channels C.
        expansion: Channels after the first layer, divided by C; 2 or 4 in the paper. The activation halves them.
        dropouts: Number of dropouts: 1 for one after the activation, 2 for another after the projection.
        drop: Probability of dropout.
        drop_path: Module applied to the output before ``identity`` is added; none by default.

    Raises:
        ConfigError: The number of dropouts is not 1 or 2, or the channels cannot be halved.

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
            raise ConfigError(f'dropouts={dropouts} must be 1 or 2.')
        if hidden < 2 or hidden % 2:
            raise ConfigError(
                f'expansion={expansion} makes {hidden} channels of {embed_dims}; it has to be an even number.'
            )
        self.expand = nn.Linear(embed_dims, hidden)
        self.project = nn.Linear(hidden // 2, embed_dims)
        self.drop = nn.Dropout(drop)
        self.out_drop = nn.Dropout(drop) if dropouts == 2 else nn.Identity()
        self.drop_path = nn.Identity() if drop_path is None else drop_path

    def forward(self, x: Tensor, identity: Tensor | None = None) -> Tensor:
        """Return the output for tokens ``(B, N, C)`` with ``identity`` (default: the tokens) added."""
        gate, value = self.expand(x).chunk(2, -1)
        out = self.out_drop(self.project(self.drop(F.silu(gate) * value)))
        return (x if identity is None else identity) + self.drop_path(out)
