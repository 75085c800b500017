"""The places of tokens on the image, which a call of a module around the attention tells."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mmdet.models.backbones.pvt import SpatialReductionAttention
from mmdet.models.backbones.swin import ShiftWindowMSA
from mmdet.models.layers.positional_encoding import SinePositionalEncoding
from mmseg.models.backbones.twins import LocallyGroupedSelfAttention
from torch import nn

import mmgate
from mmgate.analysis.probes.recording import record

TOKENS, MAP = torch.zeros(1, 24, 16), (4, 6)
PLACES: dict[str, tuple[nn.Module, Any, str, list[int]]] = {
    'windows': (ShiftWindowMSA(16, 2, 4, shift_size=2), (TOKENS, MAP), 'geometry', [4, 6, 4, 2]),
    'reduced keys': (SpatialReductionAttention(16, 2, sr_ratio=2), (TOKENS, MAP), 'geometry', [4, 6, 2]),
    'grouped': (LocallyGroupedSelfAttention(16, 2, window_size=3), (TOKENS, MAP), 'geometry', [4, 6, 3, 0]),
    'positions': (SinePositionalEncoding(4), (torch.zeros(1, 3, 5, dtype=torch.bool),), 'map_size', [3, 5]),
}


@pytest.mark.parametrize('name', PLACES)
def test_a_call_tells_the_place(name: str) -> None:
    module, given, place, expected = PLACES[name]
    with record(module, [place]) as recording:
        module(*given)
    assert recording['']['geometry' if place == 'geometry' else place].last.tolist() == expected
    assert not any(part._forward_hooks for part in module.modules())


def test_attention_over_the_whole_map_tells_its_place_itself() -> None:
    model = nn.ModuleList([ShiftWindowMSA(16, 2, 4, shift_size=2)])
    mmgate.swap_attention(model, dict(path='0', type='AgentAttention', map_size=MAP, agent_num=4))
    with record(model) as recording:
        model[0](TOKENS, MAP)
    assert [found.tolist() for found in recording['0']['geometry'].tensors] == [[4, 6, 1]]
    with mmgate.gates_disabled(model), record(model) as recording:
        model[0](TOKENS, MAP)
    assert [found.tolist() for found in recording['0']['geometry'].tensors] == [[4, 6, 4, 2]]
