"""The picture of the gates of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.gated_layers import HEADS, PLUG, SDPA, TOKENS, Model
from torch import nn

import mmgate
from mmgate.analysis.figures.gates import draw_gates
from mmgate.analysis.probes.gates import gate_statistics


def test_a_picture_has_every_layer_of_every_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gates of pairs around 0 and of heads around 1 have a map each, centred there; so has a gate of fewer heads."""
    figures: list[Any] = []
    monkeypatch.setattr('mmgate.analysis.figures.style.save', lambda figure, out: figures.append(figure))
    long = 'a_part_of_the_model_with_a_long_name'
    model = Model([*(nn.MultiheadAttention(8, HEADS, batch_first=True) for _ in range(4))])
    model.append(nn.MultiheadAttention(8, 4, batch_first=True))
    rules = [dict(PLUG, path=['0', '2']), dict(SDPA, path=['1', '3', '4'])]
    mmgate.swap_attention(model, rules)
    listed = gate_statistics(model.eval(), [torch.randn(1, TOKENS, 8)])
    for gate in listed:
        gate.path = f'{long}.{gate.path}.{long}' if gate.path in '02' else f'{long}.{gate.path}'
    draw_gates([('both', listed), ('one', listed[:1])], tmp_path / 'x.png')
    rows = figures[0].axes[:10]
    maps = [axis for axis in rows if axis.images]
    found = [(sum(axis.images[0].get_clim()) / 2, axis.get_title().split('\n')[-1]) for axis in maps]
    assert found == [
        (0, 'mean gate of 2 layers'),
        (1, 'mean gate of 2 layers'),
        (1, 'mean gate of 1 layer'),
        (0, 'mean gate of 1 layer'),
    ]
    names = [label.get_text() for label in rows[3].get_yticklabels()]
    assert names == [f'0.{long}', '1', f'2.{long}', '3', '4']
    assert [label.get_text() for label in rows[1].get_yticklabels()] == ['1', '3']
