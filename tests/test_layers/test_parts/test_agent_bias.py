"""Biases of agent attention: a checkpoint's of another map are resized, and the log names them."""

from __future__ import annotations

import pytest
import torch
from conftest import TORCH
from torch import Tensor, nn

from mmgate.layers import AgentAttention


@pytest.mark.parametrize(
    'options, shape', [({}, 'a map of (8, 8)'), (dict(window=4), 'windows of (4, 4)')], ids=['map', 'windows']
)
def test_the_log_of_a_resized_bias_names_map_or_windows(
    options: dict, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[str] = []
    monkeypatch.setattr('mmgate.layers.base.map.log', logged.append)
    pretrained = AgentAttention(12, 3, map_size=(3, 3), agent_num=4)
    AgentAttention(12, 3, map_size=(8, 8), agent_num=4, **options).load_state_dict(pretrained.state_dict())
    assert logged == [f'gate: ah_bias, aw_bias, ha_bias, wa_bias resized to {shape}']


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
