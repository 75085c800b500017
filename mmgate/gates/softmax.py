"""Plain softmax attention over a map, with which linear attentions are compared."""

from __future__ import annotations

from mmgate.gates.base.map import MapGate, map_attention


class SoftmaxGate(MapGate):
    """Plain softmax attention over all tokens of an H x W map, and its class token if there is one, as a baseline.

    ``softmax(Q K^T / sqrt(d)) V``

    Agent and linear attention differ from this baseline in the attention only, while PVT's own attention also reduces
    the keys' map and Swin's divides the map into windows. The cost is O(N^2 d) operations, in torch's fused attention.
    """


SoftmaxAttention = map_attention('SoftmaxAttention', SoftmaxGate)
