"""Efficient attention (Shen et al.): linear attention that normalises queries and keys by a softmax each."""

from __future__ import annotations

from torch import Tensor

from mmgate.gates.base.map import Size, map_attention
from mmgate.notes import note
from mmgate.ops.linear_attention import efficient_attention, key_value_map

from .base import LinearGate


class EfficientGate(LinearGate):
    """Efficient attention: linear attention with a softmax of queries over channels and of keys over tokens.

    It computes ``softmax_d(Q) (softmax_N(K)^T V)``. It takes the options of
    :class:`~mmgate.gates.linear.base.LinearGate`, with no convolution and no position encoding by default.

    Source: Efficient attention: attention with linear complexities (Shen et al., 2021).
    """

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, hw_shape: Size) -> Tensor:
        """Attend in each head by efficient attention, and return the tokens ``(B, N, C)``."""
        q, k, v = (self.split_heads(t) for t in (q, k, v))
        note(self, 'kv', lambda: key_value_map(k.softmax(-2) * k.shape[-2], v))
        return self.merge_heads(efficient_attention(q, k, v))


EfficientAttention = map_attention('EfficientAttention', EfficientGate)
