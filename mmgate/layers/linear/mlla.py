"""The attention of MLLA (Mamba-like linear attention)."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from mmgate.ops.linear_attention import kernel_attention
from mmgate.registry import MODELS

from .base import LinearAttention


def check_rotation(head_dim: int) -> None:
    """Raise ValueError unless pairs of ``head_dim`` channels part evenly between rows and columns."""
    if head_dim % 4:
        raise ValueError(
            f'The head width {head_dim} must be a multiple of 4: half the pairs turn by row, half by column.'
        )


@MODELS.register_module()
class MLLAAttention(LinearAttention):
    """Linear attention with ``ELU + 1``, rotary positions in the numerator, and a depthwise convolution (LePE).

    This is the paper's attention alone. Its block also gates and convolves around the attention, which a PVT or Swin
    block does not; value and output are projected, as in every attention here.

    Options as :class:`~mmgate.layers.linear.base.LinearAttention`.

    Raises:
        ValueError: A head width that is no multiple of 4.

    Source: Demystify Mamba in vision: a linear attention perspective (Han et al., 2024).
    """

    default_dwc = 3

    def __init__(self, embed_dims: int, num_heads: int, **kwargs: Any) -> None:
        super().__init__(embed_dims, num_heads, **kwargs)
        check_rotation(self.head_dim)

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, hw_shape: tuple[int, int]) -> Tensor:
        """Attend in every head; the denominator, which has to stay positive, is not rotated."""
        q, k, v = (self.split_heads(t) for t in (F.elu(q) + 1, F.elu(k) + 1, v))
        return self.merge_heads(kernel_attention(self.rotate(q, hw_shape), self.rotate(k, hw_shape), v, q, k))
