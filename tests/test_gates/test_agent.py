"""Agent attention against the published one: agents, windows and switches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import TORCH, assert_same, values_and_gradients
from helpers.published import agent_attention as published_agent_attention
from torch import Tensor, nn

from mmgate.errors import OptionError
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


def test_agent_attention_refuses_maps_and_heads_that_do_not_fit() -> None:
    layer, x = AgentAttention(8, 2, map_size=(3, 4), agent_num=4), torch.randn(1, 12, 8)
    for wrong in ((3, 5), (3, 3)):
        with pytest.raises(ValueError, match=f'12 tokens do not make a map of 3 x {wrong[1]}'):
            layer(x, wrong)
    with pytest.raises(ValueError, match='not a multiple'):
        AgentAttention(8, 3, map_size=(3, 4))


def test_agent_windows_attend_each_by_itself() -> None:
    whole = AgentAttention(8, 2, map_size=(4, 4), agent_num=4).double()
    windowed = AgentAttention(8, 2, map_size=(8, 8), agent_num=4, window=4).double()
    windowed.load_state_dict(whole.state_dict())  # the biases have the window's shape
    x = torch.randn(2, 8, 8, 8, dtype=torch.float64)
    out = windowed(x.flatten(1, 2), (8, 8)).view_as(x)
    expected = whole(x[:, :4, 4:].flatten(1, 2), (4, 4)).view(2, 4, 4, 8)
    torch.testing.assert_close(out[:, :4, 4:], expected)
    torch.testing.assert_close(windowed(x[:, :3, :2].flatten(1, 2), (3, 2)), whole(x[:, :3, :2].flatten(1, 2), (3, 2)))
    assert windowed(x[:, :7, :5].flatten(1, 2), (7, 5)).isfinite().all()


@pytest.mark.parametrize('size, window', [((7, 14), 7), ((4, 16), 4), ((8, 8), 4)], ids=str)
def test_biases_of_windows_have_the_size_of_windows(size: tuple[int, int], window: int) -> None:
    gate = AgentAttention(8, 2, map_size=size, agent_num=4, window=window).gate
    assert gate.map_size == size and gate.bias_size == (window, window)
    assert gate.ah_bias.shape[3] == gate.aw_bias.shape[4] == window


def test_agents_without_biases_need_no_map() -> None:
    assert AgentAttention(8, 2, bias=False).gate.map_size is None
    with pytest.raises(OptionError, match='needs the map in pre-training'):
        AgentAttention(8, 2)


@pytest.mark.parametrize(
    'options, gone, added',
    [
        (dict(bias=False), '_bias', set()),
        (dict(dwc=False), 'dwc.', set()),
        (dict(agents='static'), 'none', {'gate.agent_tokens'}),
    ],
    ids=str,
)
@pytest.mark.parametrize('agent_num', [4, 9])
def test_agent_attention_without_a_part_has_and_trains_the_others(
    options: dict[str, Any], gone: str, added: set[str], agent_num: int
) -> None:
    full = AgentAttention(8, 2, map_size=(4, 4)).state_dict()
    layer = AgentAttention(8, 2, map_size=(4, 4), agent_num=agent_num, pretrain_agent_num=4, **options).double()
    layer.init_weights()
    assert set(layer.state_dict()) == {name for name in full if gone not in name} | added
    x = torch.randn(2, 20, 8, dtype=torch.float64)
    layer(x, (4, 5)).sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in layer.parameters())
    if added:
        assert layer.gate._agents(x, (4, 5)).equal(layer.gate._agents(x + 1, (4, 5)))


class Biases(nn.Module):
    """The biases for the map of an input."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = AgentAttention(12, 3, map_size=(8, 8), agent_num=4).gate
        for parameter in self.gate.parameters():
            nn.init.normal_(parameter)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.gate.biases((x.shape[2], x.shape[3]))


@pytest.mark.skipif(TORCH < (2, 5), reason='older exports fix the sizes')
def test_an_exported_graph_is_for_maps_of_any_size() -> None:
    """Also for the map of pre-training, for which eager mode leaves a resize out."""
    model = Biases().eval()
    sizes = {axis: torch.export.Dim(name, min=2, max=64) for axis, name in ((2, 'height'), (3, 'width'))}
    graph = torch.export.export(model, (torch.randn(1, 1, 9, 10),), dynamic_shapes=dict(x=sizes)).module()
    for size in ((9, 10), (5, 14), (8, 8)):
        x = torch.randn(1, 1, *size)
        torch.testing.assert_close(graph(x), model(x))
