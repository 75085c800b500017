"""Softmax attention over a map, without gates: what the linear attentions are compared with."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from mmgate.layers.base.map import GatedMapAttention, MapGate
from mmgate.registry import MODELS


class SoftmaxGate(MapGate):
    """``softmax(Q K^T / sqrt(d)) V`` over all tokens of an H x W map, a class token included.

    The vanilla attention in a shell whose other attentions reduce no map and part it into no windows: a comparison with
    it differs by the attention alone. O(N^2 d), fused.
    """

    def mix(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, hw_shape: tuple[int, int]) -> Tensor:
        """Attend in every head."""
        q, k, v = (self.split_heads(t) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=self.drop_rate, scale=self.scale)
        return out.transpose(1, 2).flatten(2)


@MODELS.register_module()
class SoftmaxAttention(GatedMapAttention):
    """Projections with :class:`SoftmaxGate`, whose options it takes."""

    gate_type = SoftmaxGate
