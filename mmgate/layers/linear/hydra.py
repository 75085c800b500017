"""Hydra attention."""

from __future__ import annotations

from torch import Tensor

from mmgate.layers.base.map import GatedMapAttention
from mmgate.ops.linear_attention import hydra_attention
from mmgate.registry import MODELS

from .base import LinearGate


class HydraGate(LinearGate):
    """Attention of as many heads as channels: ``q̂ * sum_N(k̂ * v)``; ``num_heads`` makes no difference.

    Options as :class:`~mmgate.layers.linear.base.LinearGate`; no convolution and no position encoding by default.

    Source: Hydra attention: efficient attention with many heads (Bolya et al., 2022).
    """

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, hw_shape: tuple[int, int]) -> Tensor:
        """Mix the tokens by one vector an image."""
        return hydra_attention(q, k, v)


@MODELS.register_module()
class HydraAttention(GatedMapAttention):
    """Projections with :class:`HydraGate`, whose options it takes."""

    gate_type = HydraGate
