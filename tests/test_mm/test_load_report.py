"""What a run reports of a checkpoint: keys loaded, and gates."""

from __future__ import annotations

import copy
import logging
import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mmdet.models.backbones.pvt import SpatialReductionAttention
from mmengine.runner.checkpoint import _load_checkpoint_to_model
from torch import nn

from mmgate import swap_attention
from mmgate.errors import ConfigError
from mmgate.mm import load_report
from mmgate.mm.load_report import LoadReportHook, load_weights


class Renaming(nn.Linear):
    """Loads a weight by its former name, half as large."""

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *rest: Any) -> None:
        if f'{prefix}w' in state_dict:
            state_dict[f'{prefix}weight'] = state_dict.pop(f'{prefix}w').repeat(2, 1)
        super()._load_from_state_dict(state_dict, prefix, *rest)


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What is logged, with its level."""
    said: list[tuple[str, str]] = []
    monkeypatch.setattr(load_report, 'log', lambda text, level: said.append((logging.getLevelName(level), text)))
    return said


def load(given: dict[str, torch.Tensor], allow_mismatch: bool = False) -> None:
    model = nn.Sequential(Renaming(3, 4), nn.BatchNorm1d(4))
    runner, hook = SimpleNamespace(model=model), LoadReportHook('x.pth', allow_mismatch=allow_mismatch)
    hook.after_load_checkpoint(runner, dict(state_dict=given))
    _load_checkpoint_to_model(model, dict(state_dict=given))
    hook.before_test(runner)


LINEAR = {'0.weight': torch.zeros(4, 3), '0.bias': torch.zeros(4)}
NORM = {f'1.{name}': torch.ones(4) for name in ('weight', 'bias', 'running_mean', 'running_var')}


@pytest.mark.parametrize(
    ('given', 'level', 'line'),
    [
        (LINEAR | NORM, 'INFO', '6 of 6 keys of Sequential were loaded from x.pth, which has 6.'),
        (LINEAR | NORM | {'2.weight': torch.zeros(1)}, 'INFO', '6 of 6 .*, which has 7.'),
        (NORM, 'WARNING', '4 of 6 .*, which has 4; not loaded: 0.weight, 0.bias.'),
        ({'0.w': torch.zeros(2, 3), '0.bias': torch.zeros(4)} | NORM, 'INFO', '6 of 6'),
    ],
    ids=['all', 'and more', 'most', 'renamed and resized'],
)
def test_keys_are_counted(given: dict[str, torch.Tensor], level: str, line: str, lines: list) -> None:
    load(given)
    ((said, text),) = lines
    assert said == level and re.search(line, text)


def test_a_test_refuses_tensors_of_other_sizes(lines: list) -> None:
    other = LINEAR | NORM | {'0.weight': torch.zeros(7, 3)}
    said = r'^5 of 6 keys .*0\.weight is \(7, 3\) instead of \(4, 3\)\. .*num_classes.*--allow-mismatch'
    with pytest.raises(ConfigError, match=said):
        load(other)
    load(other, allow_mismatch=True)
    ((said, text),) = lines
    assert said == 'WARNING' and '5 of 6 keys' in text


def test_buffers_of_other_sizes_are_tested(lines: list) -> None:
    """As where Swin's windows are larger than in the checkpoint, whose indices are then left out."""
    model = nn.Linear(1, 1)
    model.register_buffer('relative_position_index', torch.zeros(9))
    runner, hook = SimpleNamespace(model=model), LoadReportHook('x.pth')
    given = model.state_dict() | {'relative_position_index': torch.zeros(4)}
    hook.after_load_checkpoint(runner, dict(state_dict=given))
    model.load_state_dict({key: given[key] for key in ('weight', 'bias')}, strict=False)
    hook.before_test(runner)
    assert 'not loaded: relative_position_index' in lines[0][1]


def gated(*paths: str) -> nn.Module:
    model = nn.ModuleDict({name: nn.MultiheadAttention(16, 4) for name in ('first', 'second')})
    if paths:
        swap_attention(model, dict(type='PLuGMultiheadAttention', path=list(paths)))
    return model


@pytest.mark.parametrize('before', [(), ('second',), ('first', 'second')], ids=['none', 'another', 'one more'])
def test_a_run_is_not_resumed_with_other_gates(before: tuple[str, ...]) -> None:
    checkpoint = dict(state_dict=gated(*before).state_dict(), optimizer={}, meta=dict(iter=1), message_hub={})
    hook = LoadReportHook('x.pth')
    hook.after_load_checkpoint(SimpleNamespace(model=gated(*before), _resume=True), checkpoint)
    hook.after_load_checkpoint(SimpleNamespace(model=gated('first')), checkpoint)
    with pytest.raises(ConfigError, match=r'cannot be resumed: .*(first|second)\.gate.*without --resume'):
        hook.after_load_checkpoint(SimpleNamespace(model=gated('first'), _resume=True), checkpoint)


def test_what_gates_replace_is_not_counted(lines: list) -> None:
    model = nn.ModuleDict(dict(attn=SpatialReductionAttention(16, 4, sr_ratio=2)))
    swap_attention(model, dict(type='AgentAttention', path='attn', agent_num=4, map_size=(4, 4)))
    checkpoint = dict(state_dict=copy.deepcopy(model.state_dict()))
    runner, hook = SimpleNamespace(model=model), LoadReportHook('x.pth')
    hook.after_load_checkpoint(runner, checkpoint)
    _load_checkpoint_to_model(model, checkpoint)
    hook.before_test(runner)
    ((said, text),) = lines
    count = len(model.state_dict()) - 4
    assert (
        said == 'INFO' and f'{count} of {count} keys' in text and text.endswith('; 4 more rest, which gates replace.')
    )


@pytest.mark.parametrize(
    'trained, loaded, level, said',
    [
        ((), ('first', 'second'), 'INFO', 'not loaded: first.gate.gate_q_proj.weight'),
        (('first',), ('first',), 'INFO', '14 of 14 keys'),
        (('first', 'second'), ('first',), 'WARNING', r'their 6 tensors are left out: second.gate.gate_q_proj.weight'),
        (('first',), (), 'WARNING', 'holds gates for which ModuleDict has no place'),
    ],
    ids=['vanilla in gated', 'the same', 'gated in half-gated', 'gated in vanilla'],
)
@pytest.mark.parametrize('run', ['before_train', 'before_test', 'load_weights'])
def test_gates_that_come_or_go(
    trained: tuple, loaded: tuple, level: str, said: str, run: str, tmp_path: Path, lines: list
) -> None:
    """A vanilla checkpoint in a gated model is how training starts; gates that are dropped are a mistake."""
    model, checkpoint = gated(*loaded), dict(state_dict=gated(*trained).state_dict())
    if run == 'load_weights':
        torch.save(checkpoint, tmp_path / 'x.pth')
        load_weights(model, str(tmp_path / 'x.pth'))
    else:
        hook, runner = LoadReportHook('x.pth'), SimpleNamespace(model=model)
        hook.after_load_checkpoint(runner, checkpoint)
        _load_checkpoint_to_model(model, checkpoint)
        getattr(hook, run)(runner)
    assert {found for found, _ in lines} == {'INFO', level}
    assert any(found == level and re.search(said, text) for found, text in lines)


@pytest.mark.parametrize(('trained', 'warned'), [((), False), (('first',), True)], ids=['vanilla', 'gated'])
def test_a_checkpoint_that_has_the_gates_of_a_file_too(trained: tuple, warned: bool, lines: list) -> None:
    model, checkpoint = gated('first'), dict(state_dict=gated(*trained).state_dict())
    hook, runner = LoadReportHook('x.pth', gates='g.safetensors'), SimpleNamespace(model=model)
    hook.after_load_checkpoint(runner, checkpoint)
    _load_checkpoint_to_model(model, checkpoint)
    hook.before_test(runner)
    found = [text for level, text in lines if level == 'WARNING']
    assert len(found) == warned and all('x.pth has gates, which replaced those of --gates g.saf' in t for t in found)


def test_less_than_half_is_refused(lines: list) -> None:
    other = {f'{key}.x': value for key, value in NORM.items()} | LINEAR
    with pytest.raises(ConfigError, match=r'2 of 6 keys.*of another model.*--allow-mismatch') as error:
        load(other)
    assert 'not loaded: 1.weight, 1.bias, 1.running_mean and 1 more' in str(error.value)
    load(other, allow_mismatch=True)
    assert '2 of 6' in lines[0][1]


def test_a_sharded_model_is_not_counted(monkeypatch: pytest.MonkeyPatch, lines: list) -> None:
    monkeypatch.setattr(load_report, 'is_model_wrapper', lambda model: True)
    load({})
    assert not lines


@pytest.mark.parametrize(
    ('left_out', 'whole', 'said'),
    [
        ((), False, 'INFO'),
        (('2.weight',), False, 'WARNING'),
        (('0.weight', '0.bias', '1.weight', '1.bias', '2.weight'), False, '3 of 8 keys of .* of another model'),
        (('1.running_mean',), True, 'WARNING'),  # older checkpoints have no new buffer
        (('2.weight',), True, 'not loaded: 2.weight. .*--allow-mismatch'),
    ],
    ids=['all', 'part', 'little', 'whole but for a buffer', 'part of what has to be whole'],
)
def test_weights_without_a_run_are_counted_too(
    left_out: tuple[str, ...], whole: bool, said: str, tmp_path: Path, lines: list
) -> None:
    model, other = (nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 5)) for _ in range(2))
    given = {key: value for key, value in other.state_dict().items() if key not in left_out}
    torch.save(given, tmp_path / 'weights.pth')
    logged = said.isupper()
    with nullcontext() if logged else pytest.raises(ConfigError, match=said):
        load_weights(model, str(tmp_path / 'weights.pth'), whole=whole)
    assert all(torch.equal(model.state_dict()[key], value) for key, value in given.items())
    assert [level for level, _ in lines] == [said] * logged


def test_a_tensor_of_another_size_is_named_without_a_run(tmp_path: Path, lines: list) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
    torch.save(model.state_dict() | {'1.weight': torch.zeros(7, 4)}, tmp_path / 'other.pth')
    load_weights(model, str(tmp_path / 'other.pth'))
    ((level, text),) = lines
    assert level == 'WARNING' and '1.weight is (7, 4) instead of (5, 4)' in text
