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
    'plug_single': (gates.PLuGGate, dict(gml='single', activation='hardtanh', ratio=0.5, residual=False, init='paper')),
    'plug_none': (gates.PLuGGate, dict(gml='none', init='vit')),
    'sdpa_g1': (gates.SDPAGate, {}),
    'sdpa_g2_silu': (gates.SDPAGate, dict(position='G2', act='silu', granularity='headwise')),
    'sdpa_g3': (gates.SDPAGate, dict(position='G3', head_shared='average')),
    'sdpa_g4': (gates.SDPAGate, dict(position='G4', act='silu', form='additive', gate_channels=3)),
    'sdpa_g5': (gates.SDPAGate, dict(position='G5', act='ns_sigmoid')),
    'sdpa_shared': (gates.SDPAGate, dict(head_shared='projection', granularity='headwise')),
    'dgsa': (gates.DGSAGate, {}),
    'dgsa_input': (gates.DGSAGate, dict(residual='input', gate_depth=3, learnable=True)),
    'differential': (gates.DifferentialGate, {}),
    'differential_v2': (gates.DifferentialV2Gate, {}),
    'differential_v2_identity': (gates.DifferentialV2Gate, dict(init='identity')),
}
PLUG: dict[str, Any] = dict(type='PLuGMultiheadAttention', init='identity')
SDPA: dict[str, Any] = dict(type='SDPAGatedMultiheadAttention', init='identity')
V2: dict[str, Any] = dict(type='DifferentialV2MultiheadAttention', init='identity')
# rules of dense gates that start as the identity
IDENTITIES: dict[str, dict[str, Any]] = {
    'plug': PLUG,
    'plug_per_head': dict(PLUG, heads='per_head', gml='sum'),
    'plug_mlp': dict(PLUG, gml='mlp', activation='softsign'),
    'plug_single': dict(PLUG, gml='single', activation='hardtanh', ratio=0.5),
    'plug_post_softmax': dict(PLUG, position='post_softmax'),
    'plug_no_residual': dict(PLUG, residual=False, activation='none'),
    'sdpa': dict(SDPA, act='silu'),
    'sdpa_additive': dict(SDPA, act='silu', form='additive', gate_channels=3),
    'sdpa_G2': dict(SDPA, position='G2', scale=2.0, granularity='headwise'),
    'sdpa_G3': dict(SDPA, position='G3', scale=2.0),
    'sdpa_G4': dict(SDPA, position='G4', scale=2.0, granularity='headwise'),
    'sdpa_G5': dict(SDPA, position='G5', scale=2.0),
    'differential_v2': V2,
    'differential_v2_small': dict(V2, lambda_init=0.01),
}
MAP: dict[str, tuple[type[MapAttention], dict[str, Any]]] = {
    'agent': (gates.AgentAttention, dict(map_size=(4, 4), agent_num=4)),
    'agent_static': (gates.AgentAttention, dict(map_size=(4, 4), agent_num=4, agents='static', window=2)),
    'saga': (gates.SAGAAttention, dict(map_size=(4, 4))),
    'softmax': (gates.SoftmaxAttention, {}),
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


def call(layer: nn.Module, hw_shape: tuple[int, int], device: str = 'cpu', **masks: Tensor) -> Callable[[Tensor], Any]:
    """Return the layer as a function of tokens ``(B, h w, C)``, all that it attends to.

    What else it is called with lies on the device; masks are for dense ones.
    """
    height, width = hw_shape
    if isinstance(layer, MapAttention):
        return lambda x: layer(x, hw_shape)
    if not isinstance(layer, DeformableAdapter):
        there = {name: mask.to(device) for name, mask in masks.items()}
        return lambda x: layer(x, x, x, **there)[0]
    points = torch.linspace(0.05, 0.95, height * width)[None, :, None, None].expand(-1, -1, 2, 2).to(device)
    levels = dict(
        spatial_shapes=torch.tensor([(height - 1, width), (1, width)]).to(device),
        level_start_index=torch.tensor([0, (height - 1) * width]).to(device),
    )

    def run(x: Tensor) -> Tensor:
        floating = isinstance(x, Tensor) and x.is_floating_point()
        return layer(x, reference_points=points.to(x.dtype) if floating else points, **levels)

    return run
