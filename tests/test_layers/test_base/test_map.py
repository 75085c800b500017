"""Attention over a map: its scale, and gates that lay beside the projections of a host."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from conftest import filled
from helpers.families import HEADS, MAP, C
from torch import nn

from mmgate.layers import AgentAttention, CrossWindowAttention, SAGAAttention
from mmgate.ops.agent import agent_attention_reference
from mmgate.ops.gated_linear import gated_linear_attention_reference


def test_attention_over_a_map_heeds_a_scale_that_is_not_the_default() -> None:
    """Agent attention's in both products, SAGA's on the queries, CSwin's on its logits."""
    x, factor = torch.randn(2, 15, 12, dtype=torch.float64), 0.9
    sizes = dict(map_size=(3, 5), qk_scale=factor)
    agent = AgentAttention(12, 3, agent_num=4, dwc=False, **sizes).double()
    saga = SAGAAttention(12, 3, dwc=False, output_augmentation=False, **sizes).double()
    cross = CrossWindowAttention(12, 3, split=None, qk_scale=factor).double()
    nn.init.zeros_(cross.lepe[0].weight)
    nn.init.zeros_(cross.lepe[0].bias)

    def split(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (3, -1)).transpose(1, 2)

    for layer in (agent, saga, cross):
        parts = layer.qkv(x).chunk(3, -1)
        q, k, v = (split(part) for part in parts)
        if layer is agent:
            grid = F.adaptive_avg_pool2d(parts[0].transpose(1, 2).unflatten(-1, (3, 5)), 2)
            tokens = split(grid.flatten(2).transpose(1, 2))
            heads = agent_attention_reference(q, k, v, tokens, *agent.gate.biases((3, 5)), factor)
        elif layer is saga:
            gates = (split(part(x).sigmoid()) for part in (saga.gate.gate_k, saga.gate.gate_v))
            heads = gated_linear_attention_reference(q * factor * 2, k, v, *gates)  # 1 / sqrt(4) is its own
        else:
            heads = (q @ k.mT * factor).softmax(-1) @ v
        torch.testing.assert_close(layer(x, (3, 5)), layer.proj(heads.transpose(1, 2).flatten(2)))


OTHER_NAMES = {
    'mmgate 0.1': ('qkv.', 'proj.'),
    'PVT': ('attn.in_proj_', 'attn.out_proj.'),
    'Swin': ('w_msa.qkv.', 'w_msa.proj.'),
}
LEFT = (
    'w_msa.relative_position_bias_table',
    'w_msa.relative_position_index',
    'sr.weight',
    'norm.bias',
    'lepe.0.weight',
)


@pytest.mark.parametrize('host', OTHER_NAMES)
@pytest.mark.parametrize('name', [name for name in MAP if name != 'cross_window'])
def test_loads_gates_that_lay_beside_projections_of_any_host(name: str, host: str) -> None:
    """And drops what the hosts have besides; a gate that was loaded is not drawn anew."""
    kind, options = MAP[name]
    saved = filled(kind(C, HEADS, **options), 0.5).state_dict()
    qkv, proj = OTHER_NAMES[host]
    names = {key: key.removeprefix('gate.').replace('qkv.', qkv).replace('proj.', proj) for key in saved}
    layer = kind(C, HEADS, **options)
    layer.load_state_dict({names[key]: value for key, value in saved.items()} | {key: torch.ones(1) for key in LEFT})
    layer.init_weights()
    assert all(torch.equal(value, saved[key]) for key, value in layer.state_dict().items())
