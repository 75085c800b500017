"""PolaFormer's linear attention, which treats positive and negative parts of queries and keys separately."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmgate.gate import Sizes
from mmgate.gates.base.map import Size, map_attention
from mmgate.notes import note
from mmgate.ops.linear_attention import key_value_map, polarity_attention, polarity_features

from ..parts.options import number
from .base import LinearGate


class PolaFormerGate(LinearGate):
    """PolaFormer's linear attention over positive and negative parts, gated: ``([same V1; opposite V2] + DWC(V)) * G``.

    The gate is ``G = x Wg``.

    Queries and keys are divided by ``softplus(s)`` and split into their positive and their negative part. Both are
    raised to a learnt power ``1 + alpha sigmoid(p)`` of each head and channel. Products of parts of the same sign weigh
    the first half V1 of the values' channels, those of opposite sign the second half V2. A learnt position encoding is
    added to K.

    Args:
        sizes: Sizes of the host's attention.
        alpha: Most by which the power exceeds 1, 0 or more.
        **kwargs: Arguments of :class:`~mmgate.gates.linear.base.LinearGate`.

    Source: PolaFormer: polarity-aware linear attention for vision transformers (Meng et al., 2025).
    """

    gate_layers = ('gate_out',)
    default_dwc = 5
    has_positions = True
    # One half of the channels is for each polarity.
    head_multiple = 2
    undecayed = (*LinearGate.undecayed, 'focus_scale', 'power')

    def __init__(
        self,
        sizes: Sizes,
        *,
        alpha: float = 4.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(sizes, dwc_shared=True, **kwargs)
        self.alpha = number('alpha', alpha, least=0)
        self.focus_scale = nn.Parameter(torch.zeros(1, 1, self.embed_dims))
        self.power = nn.Parameter(torch.zeros(1, self.num_heads, 1, self.head_dim))

    def reset(self) -> None:
        """Initialise the convolution, the position encoding, the scale, the power and the output gate."""
        super().reset()
        nn.init.zeros_(self.focus_scale)
        nn.init.zeros_(self.power)

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, hw_shape: Size) -> Tensor:
        """Attend in each head to parts of the same and of opposite sign, and return the tokens ``(B, N, C)``."""
        scale = F.softplus(self.focus_scale)
        q, k, v = (self.split_heads(t) for t in (q / scale, k / scale, v))
        power = 1 + self.alpha * self.power.sigmoid()
        note(self, 'kv', lambda: _polar_map(k, v, power))
        return self.merge_heads(polarity_attention(q, k, v, power))


def _polar_map(k: Tensor, v: Tensor, power: Tensor) -> Tensor:
    """Compute the map ``K^T V / N`` ``(B, H, 2 d, d)`` of keys and values by heads, for queries of both signs."""
    positive, negative = polarity_features(k, power)
    same, opposite = v.to(positive.dtype).chunk(2, -1)
    map_same = key_value_map(torch.cat([positive, negative], -1), same)
    map_opposite = key_value_map(torch.cat([negative, positive], -1), opposite)
    return torch.cat([map_same, map_opposite], -1)


PolaFormerAttention = map_attention('PolaFormerAttention', PolaFormerGate)
