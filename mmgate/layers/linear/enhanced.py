"""Enhanced linear attention."""

from __future__ import annotations

from torch import Tensor

from mmgate.layers.base.map import GatedMapAttention, Size
from mmgate.ops.linear_attention import kernel_attention
from mmgate.registry import MODELS

from .base import LinearGate


class EnhancedLinearGate(LinearGate):
    """Linear attention with ReLU, and a depthwise convolution: ``ReLU(Q) (ReLU(K)^T V)``, normalised, ``+ DWC(V)``.

    The convolution has C kernels of 5 x 5, which agrees with the papers' parameter count. With ``dwc=0`` it is the
    plain linear attention of the papers' ablations. It takes the options of
    :class:`~mmgate.layers.linear.base.LinearGate`.

    Source: EfficientViT: enhanced linear attention for high-resolution low-computation visual recognition (Cai et al.,
    2022).
    """

    default_dwc = 5

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, hw_shape: Size) -> Tensor:
        """Attend in every head."""
        q, k, v = (self.split_heads(t) for t in (q.relu(), k.relu(), v))
        return self.merge_heads(kernel_attention(q, k, v))

    def key_features(self, q: Tensor, k: Tensor, hw_shape: Size) -> Tensor:
        """Return the features of the keys ``(B, H, N, d)``, see :meth:`.LinearGate.key_features`."""
        return self.split_heads(k.relu())


@MODELS.register_module()
class EnhancedLinearAttention(GatedMapAttention):
    """Enhanced linear attention with projections; it takes the options of :class:`EnhancedLinearGate`."""

    gate_type = EnhancedLinearGate
