"""Rank-augmented linear attention (RALA), whose ``K^T V`` and output have a higher rank."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from mmgate import ConfigError, LinearGate, Sizes, map_attention
from mmgate.ops import kernel_attention

from .ops import rotate


class RALAGate(LinearGate):
    """RALA, linear attention with weighted keys and a gated output: ``(Q (alpha K)^T V + DWC(V)) * (x Wo)``.

    Queries and keys are ``ELU + 1``. ``alpha`` holds the attention weights from the mean query to the keys, scaled to
    the sum N. Rotary positions turn the channels of every head in the numerator; the slowest pair of channels
    turns by 1 / 10000 of the fastest.

    It takes the options of :class:`mmgate.LinearGate`.

    Raises:
        ConfigError: The head width is no multiple of 4.

    Source: Breaking the low-rank dilemma of linear attention (Fan et al., 2024), section 3.
    """

    gate_layers = ('gate_out',)
    default_dwc = 5

    def __init__(self, sizes: Sizes, **kwargs: Any) -> None:
        super().__init__(sizes, **kwargs)
        if self.head_dim % 4:
            raise ConfigError(
                f'The head width {self.head_dim} must be a multiple of 4: half the pairs turn by row, half by column.'
            )

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, hw_shape: tuple[int, int]) -> Tensor:
        """Attend with rotary positions in the numerator only, because the denominator has to stay positive."""
        q, k, v = (self.split_heads(t) for t in (F.elu(q) + 1, F.elu(k) + 1, v))
        alpha = (q.mean(-2, keepdim=True) @ k.transpose(-1, -2) * self.scale).softmax(-1) * k.shape[-2]  # (B, H, 1, N)
        k = k * alpha.transpose(-1, -2)
        turned_q, turned_k = (rotate(t, hw_shape, self.class_tokens, inclusive=True) for t in (q, k))
        self.note_map(turned_k, v)
        return self.merge_heads(kernel_attention(turned_q, turned_k, v, q, k))


RALAAttention = map_attention('RALAAttention', RALAGate, force=True)
