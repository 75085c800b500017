"""Files of gates that cannot be read, and those that were saved beside other vanilla values."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.finetuned import PLUG, describe_anew, layers, snapshot
from safetensors.torch import save_file
from torch import nn

import mmgate
from mmgate.errors import ConfigError

PLACE = dict(type=PLUG['type'])


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr('mmgate.checkpoints.gates_file.log', lambda text, level: said.append(text))
    return said


@pytest.mark.parametrize(
    ('spoil', 'message'),
    [
        (Path.unlink, 'no such file'),
        (lambda path: path.write_bytes(path.read_bytes()[:-100]), 'cannot be read as a file of gates'),
        (lambda path: save_file({'a': torch.zeros(1)}, path), 'no file of gates'),
        (
            lambda path: torch.save({}, path),
            r'whole checkpoint.*gates\.py extract CONFIG .*bad\.safetensors gates\.saf',
        ),
        (
            lambda path: torch.save({}, path, _use_new_zipfile_serialization=False),
            'whole checkpoint, no file of gates',
        ),
        (lambda path: describe_anew(path, version=7, more=1), 'of version 7; this mmgate reads 1 and 2'),
        (lambda path: describe_anew(path, places='x'), 'damaged'),
        (lambda path: describe_anew(path, places={'0.attn': dict(ratio=0.5)}), 'tensors or types of gates are missing'),
        (lambda path: describe_anew(path, gates=['x.gml.weight']), 'tensors or types of gates are missing'),
        (
            lambda path: describe_anew(path, places={'0.mlp': PLACE, '2.attn': PLACE}),
            r'gates of 0\.mlp, 2\.attn, where',
        ),
        (lambda path: describe_anew(path, places={'0': PLACE}), 'do not fit'),
        (lambda path: describe_anew(path, places={'0.attn': dict(PLACE, ratio=0.5)}), 'do not fit'),
    ],
    ids=[
        'missing',
        'cut',
        'foreign',
        'checkpoint',
        'old checkpoint',
        'version',
        'description',
        'type',
        'tensors',
        'path',
        'no attention',
        'option',
    ],
)
def test_a_bad_file_is_one_message(tmp_path: Path, spoil: Any, message: str) -> None:
    """And the model is as it was."""
    file, model = tmp_path / 'bad.safetensors', layers(())
    mmgate.save_gates(layers(), file)
    spoil(file)
    before = snapshot(model)
    with pytest.raises(ConfigError, match=message):
        mmgate.load_gates(model, file)
    assert not mmgate.gate_parameters(model) and type(model[0].attn) is nn.MultiheadAttention
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_the_last_tensors_of_a_model_are_compared_first(tmp_path: Path, warned: list[str]) -> None:
    """Its head, for instance: backbones often are the same. Of many tensors some are compared."""
    model = nn.Sequential(*layers(()), *(nn.Linear(16, 16) for _ in range(9)))
    other, file = copy.deepcopy(model), tmp_path / 'g.safetensors'
    mmgate.swap_attention(model, PLUG)
    mmgate.save_gates(model, file)
    other[-1].bias.data += 1
    mmgate.load_gates(other, file)
    assert re.search(r'1 of \d+ tensors that were compared differ \(10\.bias\)', warned[0])


def test_other_vanilla_values_are_warned_of(tmp_path: Path, warned: list[str]) -> None:
    """Of the model and of a checkpoint that comes later; not of another dtype, nor by files that hold no checksums."""
    plain, other, file = layers(()), layers(()), tmp_path / 'g.safetensors'
    nn.init.zeros_(other[1].attn.out_proj.weight)
    mmgate.save_gates(layers(), file)
    mmgate.load_gates(layers(()), file)
    mmgate.load_gates(copy.deepcopy(other).half(), file)
    assert not warned
    model = copy.deepcopy(other)
    mmgate.load_gates(model, file)
    assert '1 of 8 tensors that were compared differ (1.attn.out_proj.weight)' in warned.pop()
    model = copy.deepcopy(model)
    for state, warnings in ((plain, 0), (other, 1), (model, 0)):  # the last has the gates
        model.load_state_dict(state.state_dict(), strict=False)
        assert len(warned) == warnings
        warned.clear()
    every = copy.deepcopy(plain)
    for parameter in every.parameters():
        parameter.data += 1
    mmgate.load_gates(every, file)
    assert '8 of 8 tensors that were compared differ' in warned.pop()
    describe_anew(file, values=None)
    mmgate.load_gates(other, file)
    assert not warned
