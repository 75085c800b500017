"""Rules as text: what is read is a rule and nothing else, and what is wrong is shown as it was read."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mmcv.cnn.bricks.transformer import MultiheadAttention
from torch import nn

from mmgate.errors import ConfigError, OptionError
from mmgate.gate import Sizes, gate_of_type, gate_options, registered_gates
from mmgate.gates import PLuGMultiheadAttention
from mmgate.rules import check_rules, parse_rules, path_regex, read_rules, shown_as_read, write_rule
from mmgate.swap import swap_attention


@pytest.mark.parametrize(
    ('text', 'rules'),
    [
        ('a.*.b=PLuG', [dict(path='a.*.b', type='PLuG')]),
        (' backbone.** = mmgate.SAGA( ) ', [dict(path='backbone.**', type='mmgate.SAGA')]),
        ('a=G(x="b; c=d", y=(7, 7))', [dict(path='a', type='G', x='b; c=d', y=(7, 7))]),
        ('a=G(x="b("); c=H', [dict(path='a', type='G', x='b('), dict(path='c', type='H')]),
        ('a, b.c=G(n=-1, f=1e-3, t=None, l=[True], d={"k": 1})',
         [dict(path=['a', 'b.c'], type='G', n=-1, f=1e-3, t=None, l=[True], d=dict(k=1))]),
        ('a=G(x=sum, y=None, z=True)', [dict(path='a', type='G', x='sum', y=None, z=True)]),
        ('a=G(x=1); b=H;', [dict(path='a', type='G', x=1), dict(path='b', type='H')]),
    ],
    ids=['bare', 'spaces', 'quotes', 'bracket in quotes', 'literals', 'words', 'two'],
)  # fmt: skip
def test_reads(text: str, rules: list[dict[str, Any]]) -> None:
    assert read_rules(text) == rules
    assert read_rules('; '.join(map(write_rule, rules))) == rules


LITERALS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.tuples(inner) | st.dictionaries(st.text(), inner),
    max_leaves=4,
)
OPTIONS = st.dictionaries(st.sampled_from(['gml', 'heads', 'map_size']), LITERALS)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(OPTIONS, st.lists(st.sampled_from(['a.*', 'b.**', 'c-d.0']), min_size=1, unique=True))
def test_what_is_written_is_read(options: dict[str, Any], paths: list[str]) -> None:
    rule = dict(path=paths if len(paths) > 1 else paths[0], type='G', **options)
    assert read_rules(write_rule(rule)) == [rule]


def test_a_class_is_written_by_its_name() -> None:
    assert write_rule(dict(path='a', type=PLuGMultiheadAttention)) == 'a=PLuGMultiheadAttention'


@pytest.mark.parametrize(
    ('text', 'said'),
    [
        ('', 'it needs a path and a type'),
        ('a.b', 'it needs a path and a type'),
        ('a.b=', 'it needs a path and a type'),
        ('=G', "'' is no path"),
        ('a b=G', "'a b' is no path"),
        ('a=G(', r"what follows the path cannot be read \('\(' was never closed\)\. Read so far: path 'a'\."),
        ('a=G(x=1, x=2)', 'x is given twice'),
        ('a=G(1)', '1 has no name: write every option as option=value'),
        ('a=G(x=1;y=2)', 'what follows the path cannot be read'),
        ('a=G(**{"x": 1})', 'is no option: path and type come first'),
        ('a=G(path="b")', 'path is no option'),
        ('a=G()()', r"'G\(\)' is no name of a type"),
        ('a="G"', 'is no name of a type'),
        ('a=7', "'7' is no name of a type"),
        ('a=G(x=true)', "x=true is no literal: write x=True, or x='true' for the word"),
        ('a=G(x=none)', "x=none is no literal: write x=None, or x='none' for the word"),
        ('a=G(x=a.b)', 'x=a.b is no literal'),
        ('a=G(x=dict(y=1))', r"x=dict\(y=1\) is no literal: write a dict as \{'key': value\}"),
        ('a=G(x=1+1j+2)', 'is no literal'),
        ('a=PLuGMultiheadAttention(gml=sum())', "type 'PLuGMultiheadAttention'. The options of .* are activation, "),
        ('a=' + '(' * 5000 + ')' * 5000, 'cannot be read'),
    ],
)  # fmt: skip
def test_refuses(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        read_rules(text)
    assert repr(text) in str(error.value) and 'A rule is PATH=TYPE(option=value, ...)' in str(error.value)


@pytest.mark.parametrize(
    'value', ['__import__("os").system("touch ran")', '[open("ran", "w") for _ in (1,)]', '(lambda: 0)()', 'f"{1}"']
)
def test_nothing_is_evaluated(value: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for text in (f'a=G(x={value})', f'a={value}'):
        with pytest.raises(ConfigError, match='is no|has no name'):
            read_rules(text)
    assert not list(tmp_path.iterdir())


NAMES = ['attn', 'self_attn', 'encoder', 'encoder.attn', 'encoder.0.attn', 'encoder.0.1.attn', 'encoder2.attn']


@pytest.mark.parametrize(
    ('pattern', 'matched'),
    [
        ('*', 'attn self_attn encoder'),
        ('*.attn', 'encoder.attn encoder2.attn'),
        ('encoder*.attn', 'encoder.attn encoder2.attn'),
        ('**', ' '.join(NAMES)),
        ('**.attn', 'attn encoder.attn encoder.0.attn encoder.0.1.attn encoder2.attn'),
        ('**.*attn', 'attn self_attn encoder.attn encoder.0.attn encoder.0.1.attn encoder2.attn'),
        ('encoder.**', 'encoder encoder.attn encoder.0.attn encoder.0.1.attn'),
        ('encoder.**.attn', 'encoder.attn encoder.0.attn encoder.0.1.attn'),
        ('**.0.**.attn', 'encoder.0.attn encoder.0.1.attn'),
        ('encoder.*.**.attn', 'encoder.0.attn encoder.0.1.attn'),
        ('en.oder', ''),
        ('.attn', ''),
    ],
)
def test_stars_of_a_path(pattern: str, matched: str) -> None:
    """Two stars are any number of whole names, as in a shell, none included."""
    assert [name for name in NAMES if path_regex(pattern).fullmatch(name)] == matched.split()


@pytest.mark.parametrize(
    ('path', 'said'),
    [
        *((path, r'attention\[0\]\.path must be a pattern or a list of some') for path in (7, '', [], ['a', ''])),
        ('encoder**', r"write 'encoder\.\*\*' instead of 'encoder\*\*'"),
        (['a', '**attn'], r"write '\*\*\.attn' instead of '\*\*attn'"),
        ('other.m**a', r"write 'm\.\*\*\.a' "),
    ],
)
def test_what_is_no_path_is_refused_as_rules_are_read(path: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_rules(dict(path=path, type='PLuG'))


def test_types_and_options_are_looked_up_before_a_model_is_there() -> None:
    check_rules(read_rules("a=PLuGMultiheadAttention(gml='sum')"))
    with pytest.raises(ConfigError, match=r'--gate a=PLuGMultihedAttention: .*Did you mean\n  PLuGMultiheadAttention'):
        check_rules(read_rules('a=PLuGMultihedAttention'))
    said = r'--gate a=PLuGMultiheadAttention\(gm=1\): .*no option gm; it has activation'
    with pytest.raises(ConfigError, match=said):
        check_rules(read_rules('a=PLuGMultiheadAttention(gm=1)'))


def test_an_error_shows_the_rules_as_they_were_read() -> None:
    model = nn.ModuleDict(dict(attn=MultiheadAttention(8, 2)))
    rules = read_rules("attn=PLuGMultiheadAttention; other.*=PLuGMultiheadAttention(gml='sum')")
    with pytest.raises(ConfigError) as error, shown_as_read(rules):
        swap_attention(model, rules)
    assert "path 'other.*' matches no module" in str(error.value) and 'attn: mmcv' in str(error.value)
    assert str(error.value).endswith(
        'as they were read:\n  attention[0]: attn=PLuGMultiheadAttention\n'
        "  attention[1]: other.*=PLuGMultiheadAttention(gml='sum')"
    )


@pytest.mark.parametrize(
    'option, said',
    [
        (dict(class_token=True), 'the model tells its class tokens; leave class_token out'),
        (dict(map_size=None), 'write position_encoding=False'),
    ],
)
def test_an_option_that_meant_something_else_is_refused(option: dict[str, object], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        parse_rules(dict(path='attn', type='SAGAAttention', **option))


@pytest.mark.parametrize('registered', list(registered_gates()), ids=lambda registered: registered.__name__)
def test_every_option_of_a_gate_can_be_written_with_its_default(registered: Any) -> None:
    """What a rule accepts, the gate's constructor takes: a class that fixes an option of its base declares it."""
    sizes = Sizes(16, 2, host_map=(4, 4), stride=4)
    defaults = {name: one.default for name, one in gate_options(registered).items()}
    assert type(gate_of_type(registered)(sizes, **defaults)) is gate_of_type(registered)
