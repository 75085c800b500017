"""Options of gates that differ from those that a checkpoint was trained with, which its config tells."""

from __future__ import annotations

import copy
import re
from types import SimpleNamespace
from typing import Any

import pytest
from mmengine.config import Config
from torch import nn

from mmgate import swap_attention
from mmgate.errors import ConfigError
from mmgate.mm.load_report import LoadReportHook
from mmgate.mm.other_options import other_options
from mmgate.registry import MODELS

PLUG = dict(path=['first', 'second'], type='PLuGMultiheadAttention')


def gated(*rules: dict[str, Any]) -> nn.Module:
    model = nn.ModuleDict({name: nn.MultiheadAttention(16, 4) for name in ('first', 'second')})
    if rules:
        swap_attention(model, list(rules))
    return model


def checkpoint(*rules: dict[str, Any], cfg: Any = None) -> dict[str, Any]:
    """Return a checkpoint as mmengine's Runner writes it."""
    cfg = cfg or dict(type='mmgate.Gated', host='A', attention=list(rules))
    meta = dict(cfg=Config(dict(model=cfg)).pretty_text, iter=1)
    return dict(state_dict=gated(*rules).state_dict(), meta=meta, message_hub={}, optimizer={})


@pytest.mark.parametrize(
    ('there', 'here', 'said'),
    [
        ([PLUG], [dict(PLUG, gml='sum')], r"^gml='product' in the checkpoint, 'sum' here \(first and 1 more\)$"),
        ([dict(PLUG, gml='sum')], [PLUG], r"^gml='sum' in the checkpoint, 'product' here"),
        (
            [dict(PLUG, gml='sum', path='**')],
            [dict(PLUG, path='first'), dict(PLUG, path='second', gml='sum')],
            r"^gml='sum' in the checkpoint, 'product' here \(first\)$",
        ),
        ([PLUG], [dict(PLUG, gml='product', residual=True)], '^$'),
        ([dict(PLUG, type='mmgate.PLuGMultiheadAttention', path='*')], [PLUG], '^$'),
        ([dict(PLUG, type='mmgate.gates.plug.PLuGMultiheadAttention')], [PLUG], '^$'),
        ([PLUG], [dict(PLUG, type=MODELS.get('PLuGMultiheadAttention'), backend='auto', init='paper')], '^$'),
        ([dict(PLUG, gml='sum', path='first')], [PLUG], r'\(first\)$'),
        ([], [dict(PLUG, gml='sum')], '^$'),
    ],
    ids=['left out there', 'left out here', 'a part', 'written out', 'scope', 'import', 'start', 'half', 'vanilla'],
)
def test_options_are_compared_gate_by_gate(there: list, here: list, said: str) -> None:
    assert re.search(said, other_options(gated(*here), checkpoint(*there)))


def test_a_wrapper_around_the_model_changes_nothing() -> None:
    # As test-time augmentation has it.
    model = nn.ModuleDict(dict(module=gated(dict(PLUG, gml='sum'))))
    assert "'sum' here (first" in other_options(model, checkpoint(PLUG))


def test_a_path_that_an_older_version_took_is_left_out() -> None:
    there = dict(type='mmgate.Gated', host='A', attention=[dict(PLUG, path='**first')])
    assert other_options(gated(dict(PLUG, gml='sum')), checkpoint(PLUG, cfg=there)) == ''


def test_rules_do_not_concern_attention_that_a_type_has_built() -> None:
    def model() -> nn.Module:
        found = gated()
        found['own'] = MODELS.build(dict(type='mmgate.PLuGMultiheadAttention', embed_dims=16, num_heads=4))
        swap_attention(found, rule)
        return found

    rule = dict(PLUG, path='**', gml='sum')
    content = checkpoint(rule)
    assert other_options(model(), dict(content, state_dict=model().state_dict())) == ''


def test_no_config_no_difference() -> None:
    model, content = gated(dict(PLUG, gml='sum')), checkpoint(PLUG)
    for meta in (None, {}, dict(cfg=None), dict(cfg='not python ('), dict(cfg='x = open(1)'), dict(cfg='model = 3')):
        assert other_options(model, dict(content, meta=meta)) == ''
    # A gates file places its gates.
    assert other_options(model, checkpoint(PLUG, cfg=dict(type='mmgate.Gated', host='A', gates='g.safetensors'))) == ''
    assert other_options(model, content['state_dict']) == ''


def test_gates_of_layers_whose_type_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    here = dict(type='A', layers=[dict(self_attn=dict(type='mmgate.PLuGMultiheadAttention', embed_dims=16, gml='sum'))])
    there = copy.deepcopy(here)
    del there['layers'][0]['self_attn']['gml']
    found = other_options(gated(), checkpoint(cfg=there), here)
    assert found == "gml='product' in the checkpoint, 'sum' here (layers.0.self_attn)"
    assert not other_options(gated(), checkpoint(cfg=here), here)


@pytest.mark.parametrize('run', ['resume', 'test', 'test anyway', 'train'])
def test_a_resume_and_a_test_refuse_them(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr('mmgate.mm.load_report.log', lambda text, level=20: said.append(text))
    model, content = gated(dict(PLUG, gml='sum')), checkpoint(PLUG)
    hook = LoadReportHook('x.pth', allow_mismatch=run == 'test anyway')
    runner = SimpleNamespace(model=model, _resume=run == 'resume', cfg=Config())
    if run == 'resume':
        with pytest.raises(ConfigError, match=r"x.pth cannot be resumed.*gml='product' in the .*without --resume"):
            hook.after_load_checkpoint(runner, content)
        return
    hook.after_load_checkpoint(runner, content)
    model.load_state_dict(content['state_dict'])
    if run == 'test':
        with pytest.raises(ConfigError, match=r"trained with other options: gml='product' .*--allow-mismatch"):
            hook.before_test(runner)
        return
    (hook.before_train if run == 'train' else hook.before_test)(runner)
    assert any('other options' in line for line in said) == (run == 'train')
