"""Hydra attention: linear attention with as many heads as channels."""

from __future__ import annotations

from torch import Tensor

from mmgate.gates.base.map import Size, map_attention
from mmgate.ops.linear_attention import hydra_attention

from .base import LinearGate


class HydraGate(LinearGate):
    """Hydra attention ``q̂ * sum_N(k̂ * v)``: linear attention with as many heads as channels.

    ``num_heads`` does not matter.

    It takes the options of :class:`~mmgate.gates.linear.base.LinearGate`, with no convolution and no position encoding
    by default.

    Source: Hydra attention: efficient attention with many heads (Bolya et al., 2022).
    """

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, hw_shape: Size) -> Tensor:
        """Multiply each normalised query by one vector, the sum over the whole image of keys times values."""
        return hydra_attention(q, k, v)


HydraAttention = map_attention('HydraAttention', HydraGate)
