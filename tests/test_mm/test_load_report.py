"""Reports of a run on its checkpoint: keys loaded, gates, and options of gates that differ from those of its config."""

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
from mmengine.config import Config
from mmengine.runner.checkpoint import _load_checkpoint_to_model
from torch import nn

from mmgate import swap_attention
from mmgate.errors import ConfigError
from mmgate.mm import load_report
from mmgate.mm.load_report import LoadReportHook, load_weights
from mmgate.mm.other_options import other_options
from mmgate.registry import MODELS


class Renaming(nn.Linear):
    """Loads a weight by its former name, half as large."""

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *rest: Any) -> None:
        if f'{prefix}w' in state_dict:
            state_dict[f'{prefix}weight'] = state_dict.pop(f'{prefix}w').repeat(2, 1)
        super()._load_from_state_dict(state_dict, prefix, *rest)


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Collect what is logged, with its level."""
    said: list[tuple[str, str]] = []

    def log(text: str, level: int = logging.INFO) -> None:
        said.append((logging.getLevelName(level), text))

    monkeypatch.setattr(load_report, 'log', log)
    return said


def run(model: nn.Module, checkpoint: dict[str, Any], mode: str = 'test', **options: Any) -> None:
    hook, runner = LoadReportHook('x.pth', **options), SimpleNamespace(model=model)
    hook.after_load_checkpoint(runner, checkpoint)
    _load_checkpoint_to_model(model, checkpoint)
    (hook.before_test if mode == 'test' else hook.before_train)(runner)


LINEAR = {'0.weight': torch.zeros(4, 3), '0.bias': torch.zeros(4)}
NORM = {f'1.{name}': torch.ones(4) for name in ('weight', 'bias', 'running_mean', 'running_var')}
RESIZED = r'5 of 6 keys .*0\.weight is \(7, 3\) instead of \(4, 3\)\. .*num_classes'
OTHER = r'2 of 6 keys.*not loaded: 1.weight, 1.bias, 1.running_mean and 1 more\. It is of another model'


@pytest.mark.parametrize(
    ('given', 'level', 'line'),
    [
        (LINEAR | NORM, 'INFO', r'^6 of 6 keys of Sequential were loaded from x.pth, which has 6\.$'),
        (LINEAR | NORM | {'2.weight': torch.zeros(1)}, 'INFO', '6 of 6 .*, which has 7.'),
        (NORM, 'WARNING', '4 of 6 .*, which has 4; not loaded: 0.weight, 0.bias.'),
        ({'0.w': torch.zeros(2, 3), '0.bias': torch.zeros(4)} | NORM, 'INFO', '6 of 6'),
        (LINEAR | NORM | {'0.weight': torch.zeros(7, 3)}, 'refused', RESIZED),
        (LINEAR | NORM | {'1.running_var': torch.ones(5)}, 'WARNING', 'not loaded: 1.running_var'),
        (LINEAR | {f'{key}.x': value for key, value in NORM.items()}, 'refused', OTHER),
    ],
    ids=['all', 'and more', 'most', 'renamed and resized', 'other sizes', 'a buffer of another size', 'little'],
)
def test_keys_are_counted(given: dict[str, torch.Tensor], level: str, line: str, lines: list) -> None:
    """Swin's windows may be larger than in the checkpoint, whose indices, a buffer, are then left out."""
    model = nn.Sequential(Renaming(3, 4), nn.BatchNorm1d(4))
    if level == 'refused':
        with pytest.raises(ConfigError, match=f'^{line}.*--allow-mismatch'):
            run(copy.deepcopy(model), dict(state_dict=dict(given)))
    run(model, dict(state_dict=dict(given)), allow_mismatch=level == 'refused')
    ((said, text),) = lines
    assert said == level.replace('refused', 'WARNING') and re.search(line, text)


def test_what_gates_replace_is_not_counted(lines: list) -> None:
    model = nn.ModuleDict(dict(attn=SpatialReductionAttention(16, 4, sr_ratio=2)))
    swap_attention(model, dict(type='AgentAttention', path='attn', agent_num=4, map_size=(4, 4)))
    run(model, dict(state_dict=copy.deepcopy(model.state_dict())))
    count = len(model.state_dict()) - 4
    ((level, text),) = lines
    assert level == 'INFO' and f'{count} of {count} keys' in text
    assert text.endswith('; 4 more rest, which gates replace.')


PLUG = dict(path=['first', 'second'], type='PLuGMultiheadAttention')
SUM = dict(PLUG, gml='sum')


def gated(*rules: dict[str, Any]) -> nn.Module:
    model = nn.ModuleDict({name: nn.MultiheadAttention(16, 4) for name in ('first', 'second')})
    if rules:
        swap_attention(model, list(rules))
    return model


def plug(*paths: str, **options: Any) -> nn.Module:
    return gated(dict(PLUG, path=list(paths), **options)) if paths else gated()


def written(model: nn.Module, *rules: dict[str, Any], cfg: Any = None) -> dict[str, Any]:
    """Return a checkpoint of a model as mmengine's Runner writes it."""
    text = Config(dict(model=cfg or dict(type='mmgate.Gated', host='A', attention=list(rules)))).pretty_text
    return dict(state_dict=model.state_dict(), optimizer={}, meta=dict(iter=1, cfg=text), message_hub={})


def checkpoint(*rules: dict[str, Any], cfg: Any = None) -> dict[str, Any]:
    return written(gated(*rules), *rules, cfg=cfg)


@pytest.mark.parametrize(
    'trained, loaded, mode, level, said',
    [
        ((), ('first', 'second'), 'train', 'INFO', 'not loaded: first.gate.gate_q_proj.weight'),
        (('first',), ('first',), 'test', 'INFO', '14 of 14 keys'),
        (('first', 'second'), ('first',), 'load', 'WARNING', r'their 6 tensors are left out: second.gate.gate_q_proj'),
        (('first',), (), 'train', 'WARNING', 'holds gates for which ModuleDict has no place'),
        (('first',), (), 'test', 'WARNING', 'holds gates for which ModuleDict has no place'),
    ],
    ids=['vanilla in gated', 'the same', 'gated in half-gated', 'gated in vanilla', 'gated in vanilla in a test'],
)
def test_gates_that_come_or_go(
    trained: tuple, loaded: tuple, mode: str, level: str, said: str, tmp_path: Path, lines: list
) -> None:
    """A vanilla checkpoint in a gated model is how training starts; gates that are dropped are a mistake."""
    model, checkpoint = plug(*loaded), dict(state_dict=plug(*trained).state_dict())
    if mode == 'load':
        torch.save(checkpoint, tmp_path / 'x.pth')
        load_weights(model, str(tmp_path / 'x.pth'))
    else:
        run(model, checkpoint, mode)
    assert {found for found, _ in lines} == {'INFO', level}
    assert any(found == level and re.search(said, text) for found, text in lines)


@pytest.mark.parametrize('mode', ['test', 'train'])
@pytest.mark.parametrize('trained', [(), ('first',)], ids=['vanilla', 'gated'])
def test_a_checkpoint_that_has_the_gates_of_a_file_too(trained: tuple, mode: str, lines: list) -> None:
    run(plug('first'), dict(state_dict=plug(*trained).state_dict()), mode, gates='g.safetensors')
    said = 'x.pth has gates, which replaced those of --gates g.safetensors'
    assert [level for level, text in lines if said in text] == ['WARNING'] * len(trained)


@pytest.mark.parametrize(
    ('trained', 'options', 'said'),
    [
        ((), {}, r'these gates are not in it.*: first\.gate'),
        (('second',), {}, r': first\.gate.* more'),
        (('first', 'second'), {}, r': second\.gate'),
        (('first',), dict(gml='sum'), r"other options: gml='sum' in the checkpoint"),
        (('first',), {}, None),
    ],
    ids=['none', 'another', 'one more', 'options', 'the same'],
)
def test_a_run_is_resumed_with_its_gates_alone(trained: tuple, options: dict, said: str) -> None:
    """That a checkpoint of weights alone is refused, test_checkpoints_of_other_models says."""
    model, content = plug('first'), written(plug(*trained, **options), dict(PLUG, **options))
    hook = LoadReportHook('x.pth')
    hook.after_load_checkpoint(SimpleNamespace(model=model), content)
    match = f'x.pth .*{said}.*load_from=x.pth, without --resume'
    with pytest.raises(ConfigError, match=match) if said else nullcontext():
        hook.after_load_checkpoint(SimpleNamespace(model=model, _resume=True), content)


def test_gates_of_other_options_are_refused_in_tests_and_said_in_training(lines: list) -> None:
    other, said = checkpoint(SUM), 'trained with other options: gml='
    with pytest.raises(ConfigError, match=f'{said}.*, or give --allow-mismatch'):
        run(gated(PLUG), other)
    run(gated(PLUG), other, allow_mismatch=True)
    run(gated(PLUG), other, mode='train')
    assert [level for level, text in lines if said in text] == ['WARNING', 'INFO']


def test_a_sharded_model_is_not_counted(monkeypatch: pytest.MonkeyPatch, lines: list) -> None:
    monkeypatch.setattr(load_report, 'is_model_wrapper', lambda model: True)
    run(nn.Linear(3, 4), dict(state_dict={}))
    assert not lines


@pytest.mark.parametrize(
    ('there', 'here', 'said'),
    [
        ([PLUG], [SUM], r"^gml='product' in the checkpoint, 'sum' here \(first and 1 more\)$"),
        ([SUM], [PLUG], r"^gml='sum' in the checkpoint, 'product' here"),
        (
            [dict(SUM, path='**')],
            [dict(PLUG, path='first'), dict(PLUG, path='second', gml='sum')],
            r"^gml='sum' in the checkpoint, 'product' here \(first\)$",
        ),
        ([PLUG], [dict(PLUG, gml='product', residual=True)], '^$'),
        ([dict(PLUG, type='mmgate.PLuGMultiheadAttention', path='*')], [PLUG], '^$'),
        ([dict(PLUG, type='mmgate.gates.plug.PLuGMultiheadAttention')], [PLUG], '^$'),
        ([PLUG], [dict(PLUG, type=MODELS.get('PLuGMultiheadAttention'), backend='torch', init='paper')], '^$'),
        ([dict(SUM, path='first')], [PLUG], r'\(first\)$'),
        ([], [SUM], '^$'),
    ],
    ids=['left out there', 'left out here', 'a part', 'written out', 'scope', 'import', 'start', 'half', 'vanilla'],
)
def test_options_are_compared_gate_by_gate(there: list, here: list, said: str) -> None:
    assert re.search(said, other_options(gated(*here), checkpoint(*there)))


def test_options_that_no_rule_of_the_checkpoint_tells() -> None:
    """Of a config that is no Python or places gates by a file; attention that a type has built; a path of old."""
    model, content = gated(SUM), checkpoint(PLUG)
    for meta in (None, {}, dict(cfg=None), dict(cfg='not python ('), dict(cfg='x = open(1)'), dict(cfg='model = 3')):
        assert other_options(model, dict(content, meta=meta)) == ''
    assert other_options(model, content['state_dict']) == ''
    for one in (dict(gates='g.safetensors'), dict(attention=[dict(PLUG, path='**first')])):
        assert other_options(model, checkpoint(PLUG, cfg=dict(type='mmgate.Gated', host='A', **one))) == ''
    model = gated()
    model['own'] = MODELS.build(dict(type='mmgate.PLuGMultiheadAttention', embed_dims=16, num_heads=4))
    swap_attention(model, dict(SUM, path='**'))
    assert other_options(model, written(model, dict(SUM, path='**'))) == ''


def test_options_inside_of_a_wrapper_and_of_layers_whose_type_is_a_gate() -> None:
    # As test-time augmentation has it.
    model = nn.ModuleDict(dict(module=gated(SUM)))
    assert "'sum' here (first" in other_options(model, checkpoint(PLUG))
    layer = dict(type='mmgate.PLuGMultiheadAttention', embed_dims=16)
    there, here = (dict(type='A', layers=[dict(self_attn=dict(layer, **own))]) for own in ({}, dict(gml='sum')))
    found = other_options(gated(), checkpoint(cfg=there), here)
    assert found == "gml='product' in the checkpoint, 'sum' here (layers.0.self_attn)"
    assert not other_options(gated(), checkpoint(cfg=here), here)


@pytest.mark.parametrize(
    ('given', 'whole', 'refused'),
    [
        (LINEAR | NORM | {'0.weight': torch.zeros(7, 3)}, False, None),
        (LINEAR, False, r'2 of 6 keys .* of another model .*of this model\.$'),
        (LINEAR | {key: NORM[key] for key in ('1.weight', '1.bias')}, True, None),  # older checkpoints lack new buffers
        (NORM, True, 'not loaded: 0.weight, 0.bias. .*--allow-mismatch'),
    ],
    ids=['another size', 'little', 'whole but for buffers', 'part of what has to be whole'],
)
def test_weights_without_a_run_are_counted_too(
    given: dict[str, torch.Tensor], whole: bool, refused: str | None, tmp_path: Path, lines: list
) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    torch.save(given, tmp_path / 'weights.pth')
    with pytest.raises(ConfigError, match=refused) if refused else nullcontext():
        load_weights(model, str(tmp_path / 'weights.pth'), whole=whole)
    assert [level for level, _ in lines] == ['WARNING'] * (refused is None)
