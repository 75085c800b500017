"""Efficient attention."""

from __future__ import annotations

from torch import Tensor

from mmgate.layers.base.map import GatedMapAttention, Size
from mmgate.ops.linear_attention import efficient_attention
from mmgate.registry import MODELS

from .base import LinearGate


class EfficientGate(LinearGate):
    """Queries normalised over the channels, keys over the tokens: ``softmax_d(Q) (softmax_N(K)^T V)``.

    Options as :class:`~mmgate.layers.linear.base.LinearGate`; no convolution and no position encoding by default.

    Source: Efficient attention: attention with linear complexities (Shen et al., 2021).
    """

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, hw_shape: tuple[int, int]) -> Tensor:
        """Attend in every head."""
        return self.merge_heads(efficient_attention(*(self.split_heads(t) for t in (q, k, v))))

    def key_features(self, q: Tensor, k: Tensor, hw_shape: Size) -> Tensor:
        """Return the features of the keys ``(B, H, N, d)``."""
        return self.split_heads(k).softmax(-2) * k.shape[-2]


@MODELS.register_module()
class EfficientAttention(GatedMapAttention):
    """Projections with :class:`EfficientGate`, whose options it takes."""

    gate_type = EfficientGate
