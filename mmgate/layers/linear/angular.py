"""Linear angular attention."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from mmgate.layers.base.gate import Sizes
from mmgate.layers.base.map import GatedMapAttention, Size
from mmgate.ops.linear_attention import linear_angular_attention
from mmgate.registry import MODELS

from ..gml import check_option
from .base import LinearGate


class LinearAngularGate(LinearGate):
    """The linear term of the angular kernel, and a depthwise convolution: ``norm(V / 2 + Q̂ (K̂^T V) / pi) + DWC(V)``.

    Args:
        convolution: ``'tokens'`` (default), that of the authors' public code: along the row of all tokens, a class
            token before the map's rows among them, one kernel a head, no bias. ``'map'``: over the map, C kernels and
            biases, as the other linear attentions have it.
        dwc: Length of the kernel along the tokens, 9 by default, or side of that over the map, 3 by default; 0 for no
            convolution.
        **kwargs: Those of :class:`~mmgate.layers.linear.base.LinearGate`.

    Raises:
        ValueError: An unknown convolution.

    Source: Castling-ViT (You et al., 2023), and its public code.
    """

    def __init__(self, sizes: Sizes, *, convolution: str = 'tokens', dwc: int | None = None, **kwargs: Any) -> None:
        check_option('convolution', convolution, ('tokens', 'map'))
        self.along_tokens = convolution == 'tokens'
        length = (9 if self.along_tokens else 3) if dwc is None else dwc
        super().__init__(sizes, dwc=length, **kwargs)
        if self.along_tokens and length:
            heads: dict[str, Any] = dict(in_channels=sizes.heads, out_channels=sizes.heads, groups=sizes.heads)
            self.dwc = nn.Conv2d(**heads, kernel_size=(length, 1), padding=(length // 2, 0), bias=False)

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, hw_shape: tuple[int, int]) -> Tensor:
        """Attend in every head."""
        return self.merge_heads(linear_angular_attention(*(self.split_heads(t) for t in (q, k, v))))

    def convolve(self, v: Tensor, hw_shape: tuple[int, int]) -> Tensor:
        """Return the values convolved along the tokens, or over the map."""
        return self.merge_heads(self.dwc(self.split_heads(v))) if self.along_tokens else super().convolve(v, hw_shape)

    def key_features(self, q: Tensor, k: Tensor, hw_shape: Size) -> Tensor:
        """Return the features of the keys ``(B, H, N, d)``."""
        return F.normalize(self.split_heads(k), dim=-1)


@MODELS.register_module()
class LinearAngularAttention(GatedMapAttention):
    """Projections with :class:`LinearAngularGate`, whose options it takes."""

    gate_type = LinearAngularGate
