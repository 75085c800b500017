"""Hydra attention: linear attention with as many heads as channels."""

from __future__ import annotations

from torch import Tensor

from mmgate.layers.base.map import GatedMapAttention, Size
from mmgate.ops.linear_attention import hydra_attention
from mmgate.registry import MODELS

from .base import LinearGate


class HydraGate(LinearGate):
    """Attention with as many heads as channels, ``q̂ * sum_N(k̂ * v)``, whatever ``num_heads`` is.

    It takes the options of :class:`~mmgate.layers.linear.base.LinearGate`, with no convolution and no position encoding
    by default.

    Source: Hydra attention: efficient attention with many heads (Bolya et al., 2022).
    """

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, hw_shape: Size) -> Tensor:
        """Multiply the normalised queries by one vector of the whole image."""
        return hydra_attention(q, k, v)


@MODELS.register_module()
class HydraAttention(GatedMapAttention):
    """Hydra attention with projections; it takes the options of :class:`HydraGate`."""

    gate_type = HydraGate
