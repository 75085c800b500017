"""Efficient attention (Shen et al.): linear attention that normalises queries and keys by a softmax each."""

from __future__ import annotations

from torch import Tensor

from mmgate.layers.base.map import GatedMapAttention, Size
from mmgate.ops.linear_attention import efficient_attention
from mmgate.registry import MODELS

from .base import LinearGate


class EfficientGate(LinearGate):
    """Efficient attention: linear attention with a softmax of queries over channels and of keys over tokens.

    It computes ``softmax_d(Q) (softmax_N(K)^T V)``. It takes the options of
    :class:`~mmgate.layers.linear.base.LinearGate`, with no convolution and no position encoding by default.

    Source: Efficient attention: attention with linear complexities (Shen et al., 2021).
    """

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, hw_shape: Size) -> Tensor:
        """Attend in each head by efficient attention, and return the tokens ``(B, N, C)``."""
        return self.merge_heads(efficient_attention(*(self.split_heads(t) for t in (q, k, v))))

    def key_features(self, q: Tensor, k: Tensor, hw_shape: Size) -> Tensor:
        """Return the keys' features ``(B, H, N, d)`` for figures of ``K^T V``, see :meth:`.LinearGate.key_features`."""
        return self.split_heads(k).softmax(-2) * k.shape[-2]


@MODELS.register_module()
class EfficientAttention(GatedMapAttention):
    """Efficient attention as a module with projections; rules name this class as their ``type``.

    It takes the options of :class:`EfficientGate`.
    """

    gate_type = EfficientGate
