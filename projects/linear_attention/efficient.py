"""Efficient attention (Shen et al.): linear attention that normalises queries and keys by a softmax each."""

from __future__ import annotations

from torch import Tensor

from mmgate import LinearGate, map_attention


class EfficientGate(LinearGate):
    """Efficient attention: linear attention with a softmax of queries over channels and of keys over tokens.

    It computes ``softmax_d(Q) (softmax_N(K)^T V)``. It takes the options of :class:`mmgate.LinearGate`, with no
    convolution and no position encoding by default.

    Source: Efficient attention: attention with linear complexities (Shen et al., 2021), Eq. 4 and 5.
    """

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, hw_shape: tuple[int, int]) -> Tensor:
        """Attend in each head by efficient attention, and return the tokens ``(B, N, C)``."""
        q, k, v = (self.split_heads(t) for t in (q, k, v))
        weights = k.softmax(-2)
        self.note_map(weights * k.shape[-2], v)
        return self.merge_heads(q.softmax(-1) @ (weights.transpose(-1, -2) @ v))


EfficientAttention = map_attention('EfficientAttention', EfficientGate, force=True)
