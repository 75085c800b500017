"""Attention over a map: its scale, and what a checkpoint of another size brings."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
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


def test_what_is_resized_on_loading_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr('mmgate.layers.base.map.log', said.append)
    small, large = (SAGAAttention(8, 2, map_size=size) for size in ((4, 4), (6, 6)))
    large.load_state_dict(large.state_dict())
    assert not said
    large.load_state_dict(small.state_dict())
    assert len(said) == 1 and 'position_encoding resized to a map of (6, 6)' in said[0]
