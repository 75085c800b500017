"""Agent attention against the published one: agents, windows and switches."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from conftest import TORCH, assert_same, filled, values_and_gradients
from helpers.published import agent_attention as published_agent_attention
from torch import Tensor, nn

from mmgate.gates import AgentAttention

B, H, D = 2, 3, 4


@pytest.mark.parametrize('second', [D**-0.15, None], ids=['broadcast_scale', 'one_scale'])
def test_agents_without_training_add_values_and_scale_the_broadcast(second: float | None) -> None:
    """Eq. 9: ``softmax(Q A^T s2) softmax(A K^T s) V + k V``."""
    options = dict(bias=False, dwc=False, value_factor=0.075, broadcast_scale=second, qk_scale=0.9)
    layer = AgentAttention(H * D, H, map_size=(3, 4), agent_num=4, **options).double()
    x = torch.randn(B, 12, H * D, dtype=torch.float64)
    q, k, v = layer.qkv(x).chunk(3, -1)
    agents = F.adaptive_avg_pool2d(q.transpose(1, 2).reshape(B, -1, 3, 4), 2).flatten(2).transpose(1, 2)
    heads = [t.reshape(B, -1, H, D).transpose(1, 2) for t in (q, k, v, agents)]
    gathered = (heads[3] @ heads[1].mT * 0.9).softmax(-1) @ heads[2]
    expected = ((heads[0] @ heads[3].mT * (second or 0.9)).softmax(-1) @ gathered).transpose(1, 2).flatten(
        2
    ) + 0.075 * v
    torch.testing.assert_close(layer(x, (3, 4)), layer.proj(expected))


@pytest.mark.parametrize('agent_num', [9, 36], ids=['pretraining', 'more'])
@pytest.mark.parametrize('hw_shape', [(8, 8), (5, 11)], ids=str)
def test_agent_layer_is_the_published_one(agent_num: int, hw_shape: tuple[int, int]) -> None:
    layer = AgentAttention(12, 3, map_size=(8, 8), agent_num=agent_num, pretrain_agent_num=9).double()
    x = torch.randn(2, hw_shape[0] * hw_shape[1], 12, dtype=torch.float64)

    names = {name.removeprefix('gate.'): parameter for name, parameter in layer.named_parameters()}

    def published(x: torch.Tensor) -> torch.Tensor:
        return published_agent_attention(names, '', x, hw_shape, 3, agent_num)

    expected = values_and_gradients(published, [x], [0])
    expected |= {name: p.grad for name, p in layer.named_parameters()}
    layer.zero_grad()
    actual = values_and_gradients(lambda x: layer(x, hw_shape), [x], [0])
    actual |= {name: p.grad for name, p in layer.named_parameters()}
    assert_same(actual, expected, rtol=1e-8, atol=1e-8)


def test_agent_windows_attend_each_by_itself() -> None:
    whole = AgentAttention(8, 2, map_size=(4, 4), agent_num=4).double()
    windowed = AgentAttention(8, 2, map_size=(8, 8), agent_num=4, window=4).double()
    windowed.load_state_dict(whole.state_dict())  # the biases have the window's shape
    assert windowed.gate.map_size == (8, 8) and windowed.gate.bias_size == (4, 4)
    x = torch.randn(2, 8, 8, 8, dtype=torch.float64)
    out = windowed(x.flatten(1, 2), (8, 8)).view_as(x)
    expected = whole(x[:, :4, 4:].flatten(1, 2), (4, 4)).view(2, 4, 4, 8)
    torch.testing.assert_close(out[:, :4, 4:], expected)
    torch.testing.assert_close(windowed(x[:, :3, :2].flatten(1, 2), (3, 2)), whole(x[:, :3, :2].flatten(1, 2), (3, 2)))
    assert windowed(x[:, :7, :5].flatten(1, 2), (7, 5)).isfinite().all()


class OfImages(nn.Module):
    """Agents over images, whose height and width an export keeps open."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = AgentAttention(12, 3, map_size=(8, 8), agent_num=4)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x.flatten(2).transpose(1, 2), (x.shape[2], x.shape[3]))


@pytest.mark.skipif(TORCH < (2, 5), reason='older exports fix the sizes')
def test_an_exported_graph_is_for_maps_of_any_size() -> None:
    """Also for the map of pre-training, for which eager mode leaves a resize out."""
    model = filled(OfImages(), 0.5).eval()
    sizes = {axis: torch.export.Dim(name, min=2, max=64) for axis, name in ((2, 'height'), (3, 'width'))}
    graph = torch.export.export(model, (torch.randn(1, 12, 9, 10),), dynamic_shapes=dict(x=sizes)).module()
    for size in ((9, 10), (5, 14), (8, 8)):
        x = torch.randn(1, 12, *size)
        torch.testing.assert_close(graph(x), model(x), rtol=1e-4, atol=1e-4)
