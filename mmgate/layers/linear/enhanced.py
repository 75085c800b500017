"""Enhanced linear attention."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mmgate.ops.linear_attention import kernel_attention
from mmgate.registry import MODELS

from .base import LinearAttention


@MODELS.register_module()
class EnhancedLinearAttention(LinearAttention):
    """Linear attention with ReLU, and a depthwise convolution: ``ReLU(Q) (ReLU(K)^T V)``, normalised, ``+ DWC(V)``.

    With ``dwc=0`` it is the vanilla linear attention of the papers' ablations.

    Args:
        embed_dims: Channels C.
        num_heads: Heads H.
        dwc: Side of the convolution's kernel, which has C channels; 0 for none. 5 gives the papers' parameter count.
        class_token: Whether a class token stands before the map's tokens (DeiT).
        **kwargs: As :class:`~mmgate.layers.linear.base.LinearAttention`.

    Source: EfficientViT: enhanced linear attention for high-resolution low-computation visual recognition (Cai et al.,
    2022).
    """

    def __init__(
        self, embed_dims: int, num_heads: int, *, dwc: int = 5, class_token: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(embed_dims, num_heads, dwc=dwc, class_token=class_token, **kwargs)

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, hw_shape: tuple[int, int]) -> Tensor:
        """Attend in every head."""
        q, k, v = (self.split_heads(t) for t in (q.relu(), k.relu(), v))
        return self.merge_heads(kernel_attention(q, k, v))
