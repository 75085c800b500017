"""Calibration: what is wrong, crashes or hangs is out, on the very tensors that are timed; the fastest is kept."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mmgate.benchmarks import calibration
from mmgate.benchmarks.calibration import Row, compare, disagreement, judge, keep, outcome, problem
from mmgate.ops import backend as choice
from mmgate.ops.backend import SIZES, Backend, find

CPU = torch.device('cpu')


def package(op: str) -> Any:
    return sys.modules[f'mmgate.ops.{op}']


def reference(op: str, **arguments: Any) -> Tensor:
    return find(op, choice.OPERATORS[op], 'torch').run(**arguments)


@pytest.fixture(autouse=True)
def _own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv('MMGATE_CALIBRATION', str(tmp_path / 'calibration.json'))
    monkeypatch.setattr(calibration, 'SECONDS', 0.0)
    choice.winners.cache_clear()
    yield
    choice.winners.cache_clear()


def half_of_encoders(value: Tensor, **others: Any) -> Tensor:
    """Wrong by half wherever queries are tokens, which is where kernels go another way."""
    output = reference('ms_deform_attn', value=value, **others)
    return output * (0.5 if output.shape[1] == value.shape[1] else 1.0)


def half_without_masks(key: Tensor, bias: Tensor | None, **others: Any) -> Tensor:
    """Wrong by half wherever whole blocks need no mask."""
    output = reference('plug_attention', key=key, bias=bias, **others)
    return output * (0.5 if bias is None and not key.shape[2] % 16 else 1.0)


def wrong_gradient(query: Tensor, **others: Any) -> Tensor:
    return reference('plug_attention', query=1.5 * query - 0.5 * query.detach(), **others)


@pytest.mark.parametrize(
    'op, run, size, out',
    [
        ('ms_deform_attn', half_of_encoders, 'large', 'the output is off by'),
        ('ms_deform_attn', half_of_encoders, 'medium', None),
        ('plug_attention', half_without_masks, 'medium', 'the output is off by'),
        ('plug_attention', half_without_masks, 'large', 'the output is off by'),
        ('plug_attention', half_without_masks, 'small', None),
        ('plug_attention', wrong_gradient, 'small', 'the gradient of argument 0 is off by'),
    ],
)
def test_what_is_wrong_is_out(op: str, run: Any, size: str, out: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = (*choice.OPERATORS[op], Backend('odd', run))
    monkeypatch.setattr(package(op), 'BACKENDS', odd)
    expected = outcome(problem(op, size, 'float32', 'tiny', CPU), calibration.REFERENCES[op], wide=True)
    row = judge(Row(op, 'float32', size, 'odd'), 'tiny', CPU, expected)
    assert (row.out or '').startswith(out or '') and bool(row.out) == bool(out) and bool(row.ms) != bool(out)


@pytest.mark.parametrize('last, out', [(1.04, ''), (1.06, 'off by 6'), (float('nan'), 'off by nan')])
def test_what_disagrees(last: float, out: str) -> None:
    found = disagreement(dict(x=torch.tensor([1.0, 1.0, last])), dict(x=torch.ones(3)), 0.05)
    assert out in (found or '') and bool(found) is bool(out)


@pytest.mark.parametrize('op', choice.OPERATORS)
def test_what_backends_are_compared_with_is_the_reference(op: str) -> None:
    for size in SIZES:
        given = problem(op, size, 'float32', 'tiny', CPU)
        whole, found = (outcome(given, name, wide=True) for name in ('torch', calibration.REFERENCES[op]))
        assert whole.keys() == found.keys() and len(whole) >= 5 and all(x.any() for x in whole.values())
        assert disagreement(found, whole, 1e-6) is None


@pytest.mark.parametrize('op', choice.OPERATORS)
def test_problems_are_of_the_sizes_that_calls_ask_for(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At full size, without running anything; an encoder's queries are its tokens, whole blocks have no mask."""
    asked: list[str] = []

    def note(op: str, backends: Any, tensor: Tensor, name: str, work: Any, /, **arguments: Any) -> None:
        asked.append(choice.size_class(*work))
        if op == 'ms_deform_attn':
            queries_are_tokens = arguments['logits'].shape[1] == arguments['value'].shape[1]
            assert queries_are_tokens is (asked[-1] == 'large')
        else:
            whole_blocks = arguments['bias'] is None and arguments['query'].shape[2] % 128 == 0
            assert whole_blocks is (asked[-1] != 'small')

    monkeypatch.setattr(package(op), 'run', note)
    for size in SIZES:
        given = problem(op, size, 'float32', 'full', CPU)
        given.call(*given.inputs, backend='torch')
    assert asked == list(SIZES)


def test_the_fastest_is_kept_where_it_beats_the_order() -> None:
    rows = [
        Row('ms_deform_attn', 'float32', size, name, {'forward': 1.0, 'forward+backward': ms})
        for size, times in dict(small=(10, 9.6, 9.7, 1), medium=(10, 9, 8, 1), large=(10, 11, 10, 12)).items()
        for name, ms in zip(('cpu', 'grid_sample', 'triton', 'torch'), times, strict=True)
    ]
    rows = [replace(row, out='wrong') if (row.size, row.backend) == ('large', 'cpu') else row for row in rows]
    keep(rows, CPU)
    kept = {f'torch.float32 {size}': name for size, name in dict(small='cpu', medium='triton', large='triton').items()}
    assert choice.winners('ms_deform_attn', 'cpu', None) == kept
    keep([Row('ms_deform_attn', 'float32', 'small', 'cpu', out='wrong')], CPU)
    assert choice.winners('ms_deform_attn', 'cpu', None) == kept, 'where nothing is right, nothing is written'


BAD = """
import os, sys, time
import mmgate.ops
from mmgate.ops import backend

def crash(**_): os.abort()
def hang(**_): time.sleep(100)
def sticky(**_): raise RuntimeError('illegal address')

kinds = [backend.Backend(f.__name__, f) for f in (crash, hang, sticky)]
package = sys.modules['mmgate.ops.ms_deform_attn']
package.BACKENDS = (*kinds, *package.BACKENDS)
"""


def test_a_crash_or_a_hang_is_out_and_the_rest_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / 'sitecustomize.py').write_text(BAD)
    monkeypatch.setenv('PYTHONPATH', str(tmp_path) + ':' + str(Path(calibration.__file__).parents[2]))
    kinds = [Backend(x, lambda x: x) for x in ('crash', 'hang', 'sticky')]
    kinds.append(find('ms_deform_attn', choice.OPERATORS['ms_deform_attn'], 'torch'))
    monkeypatch.setattr(calibration, 'OPERATORS', {'ms_deform_attn': kinds})
    rows = list(compare(CPU, ['float32'], 'tiny', limit=30, sizes=('small', 'large')))
    assert [(row.backend, row.size) for row in rows] == [(x.name, size) for x in kinds for size in ('small', 'large')]
    out = {(row.backend, row.size): row.out for row in rows}
    lost = 'not tried, as its process was lost before'
    assert out['crash', 'small'] == 'its process ended with -6' and out['crash', 'large'] == lost
    assert out['hang', 'small'] == 'took longer than 30 s' and out['hang', 'large'] == lost
    assert out['sticky', 'small'] == out['sticky', 'large'] == 'RuntimeError: illegal address'
    assert not out['torch', 'small'] and not out['torch', 'large'] and all(rows[-1].ms.values())
