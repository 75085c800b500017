"""Linear angular attention."""

from __future__ import annotations

from torch import Tensor

from mmgate.ops.linear_attention import linear_angular_attention
from mmgate.registry import MODELS

from .base import LinearAttention


@MODELS.register_module()
class LinearAngularAttention(LinearAttention):
    """The linear term of the angular kernel, and a depthwise convolution: ``norm(V / 2 + Q̂ (K̂^T V) / pi) + DWC(V)``.

    The convolution is one of 3 x 3 over the map with C kernels, the size that keeps to the papers' parameter counts.

    Options as :class:`~mmgate.layers.linear.base.LinearAttention`.

    Source: Castling-ViT (You et al., 2023).
    """

    default_dwc = 3

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, hw_shape: tuple[int, int]) -> Tensor:
        """Attend in every head."""
        return self.merge_heads(linear_angular_attention(*(self.split_heads(t) for t in (q, k, v))))
