"""Rank-augmented linear attention (RALA), whose ``K^T V`` and output have a higher rank."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from mmgate.gates.base.map import Size, map_attention
from mmgate.ops.linear_attention import kernel_attention, rank_augmented_keys

from .base import LinearGate


class RALAGate(LinearGate):
    """RALA, linear attention with weighted keys and a gated output: ``(Q (alpha K)^T V + DWC(V)) * (x Wo)``.

    Queries and keys are ``ELU + 1``. ``alpha`` holds the attention weights from the mean query to the keys, scaled to
    the sum N. Rotary positions turn the channels of every head in the numerator; the slowest pair of channels
    turns by 1 / 10000 of the fastest.

    It takes the options of :class:`~mmgate.gates.linear.base.LinearGate`.

    Source: Breaking the low-rank dilemma of linear attention (Fan et al., 2024), section 3.
    """

    gate_layers = ('gate_out',)
    default_dwc = 5
    # One half of the pairs of channels turns by row, the other by column.
    head_multiple = 4

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, hw_shape: Size) -> Tensor:
        """Attend with rotary positions in the numerator only, because the denominator has to stay positive."""
        q, k, v = (self.split_heads(t) for t in (F.elu(q) + 1, F.elu(k) + 1, v))
        k = rank_augmented_keys(q, k, scale=self.scale)
        turned_q, turned_k = (self.rotate(t, hw_shape, inclusive=True) for t in (q, k))
        self.note_map(turned_k, v)
        return self.merge_heads(kernel_attention(turned_q, turned_k, v, q, k))


RALAAttention = map_attention('RALAAttention', RALAGate)
