"""Enhanced linear attention, from EfficientViT: ReLU features and a depthwise convolution."""

from __future__ import annotations

from torch import Tensor

from mmgate import LinearGate, map_attention
from mmgate.ops import kernel_attention


class EnhancedLinearGate(LinearGate):
    """Linear attention with ReLU features, plus a depthwise convolution: ``ReLU(Q) (ReLU(K)^T V) + DWC(V)``.

    The product is normalised by the sums of its weights.

    The convolution has C kernels of 5 x 5, which agrees with the papers' parameter count. With ``dwc=0`` it is the
    plain linear attention of the papers' ablations. It takes the options of :class:`mmgate.LinearGate`.

    Source: EfficientViT: enhanced linear attention for high-resolution low-computation visual recognition (Cai et al.,
    2022).
    """

    default_dwc = 5

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, hw_shape: tuple[int, int]) -> Tensor:
        """Attend in each head by linear attention with ReLU features, and return the tokens ``(B, N, C)``."""
        q, k, v = (self.split_heads(t) for t in (q.relu(), k.relu(), v))
        self.note_map(k, v)
        return self.merge_heads(kernel_attention(q, k, v))


EnhancedLinearAttention = map_attention('EnhancedLinearAttention', EnhancedLinearGate, force=True)
