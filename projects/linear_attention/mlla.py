"""The linear attention of MLLA (Mamba-like linear attention)."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from mmgate import ConfigError, LinearGate, Sizes, map_attention
from mmgate.ops import kernel_attention

from .ops import rotate


class MLLAGate(LinearGate):
    """MLLA's linear attention: features ``ELU + 1``, rotary positions in the numerator, a depthwise convolution.

    As in the authors' code, all C channels are rotated before they are split into heads. The first half of the heads
    turns by row, the second by column; the first head of each half turns fastest.

    This is the paper's attention without the rest of its block, which has a gate and a convolution around the
    attention. Values and output are projected, as in every attention here.

    It takes the options of :class:`mmgate.LinearGate`.

    Raises:
        ConfigError: The number of channels is no multiple of 4.

    Source: Demystify Mamba in vision: a linear attention perspective (Han et al., 2024).
    """

    default_dwc = 3

    def __init__(self, sizes: Sizes, **kwargs: Any) -> None:
        super().__init__(sizes, **kwargs)
        if self.embed_dims % 4:
            raise ConfigError(
                f'embed_dims={self.embed_dims} must be a multiple of 4: half the pairs turn by row, half by column.'
            )

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, hw_shape: tuple[int, int]) -> Tensor:
        """Attend with rotary positions in the numerator only, because the denominator has to stay positive."""
        q = F.elu(q) + 1
        k = F.elu(k) + 1
        turned = (rotate(t, hw_shape, self.class_tokens) for t in (q, k))
        turned_q, turned_k, v, q, k = (self.split_heads(t) for t in (*turned, v, q, k))
        self.note_map(turned_k, v)
        return self.merge_heads(kernel_attention(turned_q, turned_k, v, q, k))


MLLAAttention = map_attention('MLLAAttention', MLLAGate, force=True)
