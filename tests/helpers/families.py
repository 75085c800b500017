"""Every family of attention as a layer, by one call: tokens of a map in, tokens out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from helpers.gated import gated_attention
from mmgate import gates
from mmgate.gates.base.deformable import DeformableAdapter
from mmgate.gates.base.map import MapAttention

C, HEADS = 16, 2
DENSE: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
    'plug': (gates.PLuGGate, {}),
    'plug_paper': (gates.PLuGGate, dict(init='paper')),
    'plug_per_head': (gates.PLuGGate, dict(heads='per_head', gml='mlp', activation='softsign', init='paper')),
    'plug_sum': (gates.PLuGGate, dict(gml='sum', activation='none', position='post_softmax', init='paper')),
    'sdpa_g1': (gates.SDPAGate, {}),
    'sdpa_g2_silu': (gates.SDPAGate, dict(position='G2', act='silu', granularity='headwise')),
    'sdpa_g5': (gates.SDPAGate, dict(position='G5', act='ns_sigmoid')),
    'dgsa': (gates.DGSAGate, {}),
    'differential': (gates.DifferentialGate, {}),
    'differential_v2': (gates.DifferentialV2Gate, {}),
    'differential_v2_identity': (gates.DifferentialV2Gate, dict(init='identity')),
}
MAP: dict[str, tuple[type[MapAttention], dict[str, Any]]] = {
    'agent': (gates.AgentAttention, dict(map_size=(4, 4), agent_num=4)),
    'agent_static': (gates.AgentAttention, dict(map_size=(4, 4), agent_num=4, agents='static', window=2)),
    'saga': (gates.SAGAAttention, dict(map_size=(4, 4))),
}
DEFORMABLE: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
    'ungated': (gates.MultiScaleDeformableAttention, {}),
    'plug_deformable': (gates.PLuGMultiScaleDeformableAttention, dict(init='paper')),
    'plug_deformable_tanh': (
        gates.PLuGMultiScaleDeformableAttention,
        dict(init='paper', activation='tanh', gml='mlp', position='post_softmax'),
    ),
}
FAMILIES = [*DENSE, *MAP, *DEFORMABLE]


def build(name: str) -> nn.Module:
    """Return a layer in evaluation mode, without dropout."""
    if name in DENSE:
        cls, options = DENSE[name]
        return gated_attention(cls, C, HEADS, batch_first=True, **options).eval()
    if name in MAP:
        kind, options = MAP[name]
        return kind(C, HEADS, **options).eval()
    cls, options = DEFORMABLE[name]
    layer: Any = cls(C, HEADS, num_levels=2, num_points=2, batch_first=True, dropout=0.0, **options)
    layer.init_weights()
    return layer.eval()


def call(layer: nn.Module, hw_shape: tuple[int, int]) -> Callable[[Tensor], Tensor]:
    """Return the layer as a function of tokens ``(B, h w, C)``, all that it attends to."""
    height, width = hw_shape

    def run(x: Tensor) -> Tensor:
        if isinstance(layer, MapAttention):
            return layer(x, hw_shape)
        if isinstance(layer, DeformableAdapter):
            shapes = torch.tensor([(height - 1, width), (1, width)])
            points = torch.linspace(0.05, 0.95, height * width)[None, :, None, None].expand(-1, -1, 2, 2)
            floating = isinstance(x, Tensor) and x.is_floating_point()
            return layer(
                x,
                reference_points=points.to(x.dtype) if floating else points,
                spatial_shapes=shapes,
                level_start_index=torch.tensor([0, (height - 1) * width]),
            )
        return layer(x, x, x)[0]

    return run
