"""The attention of MLLA (Mamba-like linear attention)."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from mmgate.layers.base.gate import Sizes
from mmgate.layers.base.map import GatedMapAttention, Size
from mmgate.ops.linear_attention import kernel_attention
from mmgate.registry import MODELS

from .base import LinearGate


class MLLAGate(LinearGate):
    """Linear attention with ``ELU + 1``, rotary positions in the numerator, and a depthwise convolution (LePE).

    All C channels are rotated before the heads part: in the authors' code the first half of the heads turns by row, the
    second by column, the first head of each half fastest.

    This is the paper's attention alone. Its block also gates and convolves around the attention, which a PVT or Swin
    block does not; value and output are projected, as in every attention here.

    Options as :class:`~mmgate.layers.linear.base.LinearGate`.

    Raises:
        ValueError: A number of channels that is no multiple of 4.

    Source: Demystify Mamba in vision: a linear attention perspective (Han et al., 2024).
    """

    default_dwc = 3

    def __init__(self, sizes: Sizes, **kwargs: Any) -> None:
        super().__init__(sizes, **kwargs)
        if self.embed_dims % 4:
            raise ValueError(
                f'embed_dims={self.embed_dims} must be a multiple of 4: half the pairs turn by row, half by column.'
            )

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, hw_shape: tuple[int, int]) -> Tensor:
        """Attend in every head; the denominator, which has to stay positive, is not rotated."""
        q, k = F.elu(q) + 1, F.elu(k) + 1
        tokens = (self.rotate(q, hw_shape), self.rotate(k, hw_shape), v, q, k)
        return self.merge_heads(kernel_attention(*(self.split_heads(t) for t in tokens)))

    def key_features(self, q: Tensor, k: Tensor, hw_shape: Size) -> Tensor:
        """Return the features of the keys ``(B, H, N, d)``."""
        return self.split_heads(self.rotate(F.elu(k) + 1, hw_shape))


@MODELS.register_module()
class MLLAAttention(GatedMapAttention):
    """Projections with :class:`MLLAGate`, whose options it takes."""

    gate_type = MLLAGate
