"""Hydra attention: linear attention with as many heads as channels."""

from __future__ import annotations

import torch
from torch import Tensor

from mmgate import LinearGate, map_attention

from .ops import unit


class HydraGate(LinearGate):
    """Hydra attention ``q̂ * sum_N(k̂ * v)``: linear attention with as many heads as channels.

    ``q̂`` and ``k̂`` are normalised over all channels. ``num_heads`` does not matter.

    It takes the options of :class:`mmgate.LinearGate`, with no convolution and no position encoding by default.

    Source: Hydra attention: efficient attention with many heads (Bolya et al., 2022), Eq. 8.
    """

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, hw_shape: tuple[int, int]) -> Tensor:
        """Multiply each normalised query by one vector, the sum over the whole image of keys times values."""
        # A sum over many tokens may leave half precision.
        total = (unit(k) * v).sum(-2, keepdim=True, dtype=torch.promote_types(v.dtype, torch.float32))
        return (unit(q) * total).to(v.dtype)


HydraAttention = map_attention('HydraAttention', HydraGate, force=True)
