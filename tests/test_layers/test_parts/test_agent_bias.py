"""Biases of agent attention: a checkpoint's of another map are resized, and the log names them."""

from __future__ import annotations

import pytest

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
