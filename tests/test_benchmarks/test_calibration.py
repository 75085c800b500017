"""Calibration: what is wrong, crashes or hangs is out, on the very tensors that are timed; the fastest is kept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mmgate.benchmarks import calibration
from mmgate.benchmarks.calibration import Row, compare, disagreement, exact, judge, keep, outcome, problem
from mmgate.ops import backend as choice
from mmgate.ops import ms_deform_attn as sampler_function  # noqa: F401  (registers)
from mmgate.ops.backend import SIZES, Backend, find

CPU = torch.device('cpu')
OPS = ('ms_deform_attn', 'plug_attention')


@pytest.fixture(autouse=True)
def _own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv('MMGATE_CALIBRATION', str(tmp_path / 'calibration.json'))
    monkeypatch.setattr(calibration, 'SECONDS', 0.0)
    choice.winners.cache_clear()
    yield
    choice.winners.cache_clear()


def half_of_encoders(value: Tensor, *rest: Any) -> Tensor:
    """Wrong by half wherever queries are tokens, which is where kernels go another way."""
    output = find('ms_deform_attn', choice.OPERATORS['ms_deform_attn'], 'torch').run(value, *rest)
    return output * (0.5 if output.shape[1] == value.shape[1] else 1.0)


def half_without_masks(*arguments: Any) -> Tensor:
    """Wrong by half wherever whole blocks need no mask."""
    output = find('plug_attention', choice.OPERATORS['plug_attention'], 'torch').run(*arguments)
    return output * (0.5 if arguments[6] is None and not arguments[1].shape[2] % 16 else 1.0)


class OtherGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 1.5 * grad


def wrong_gradient(query: Tensor, *rest: Any) -> Tensor:
    return find('plug_attention', choice.OPERATORS['plug_attention'], 'torch').run(OtherGradient.apply(query), *rest)


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
    monkeypatch.setitem(choice.OPERATORS, op, (*choice.OPERATORS[op], Backend('odd', lambda x: None, run)))
    row = judge(Row(op, 'float32', size, 'odd'), 'tiny', CPU, exact(op, problem(op, size, 'float32', 'tiny', CPU)))
    assert (row.out or '').startswith(out or '') and bool(row.out) == bool(out) and bool(row.ms) != bool(out)


def test_what_is_no_number_or_missing_disagrees() -> None:
    right = {'the output': torch.ones(3)}
    assert 'off by nan' in str(disagreement({'the output': torch.full((3,), float('nan'))}, right, 1.0))
    assert disagreement({}, right, 1.0) == 'the output is missing'
    assert disagreement({'the output': torch.tensor([1.0, 1.0, 1.04])}, right, 0.05) is None


@pytest.mark.parametrize('op', OPS)
def test_the_reference_in_pieces_is_the_reference(op: str) -> None:
    for size in SIZES:
        arguments = problem(op, size, 'float32', 'tiny', CPU)
        whole = outcome(op, find(op, choice.OPERATORS[op], 'torch').run, arguments)
        pieces = exact(op, arguments)
        assert whole.keys() == pieces.keys() and len(whole) >= 5
        for name, x in whole.items():
            torch.testing.assert_close(
                x, pieces[name], rtol=1e-3, atol=1e-3 * float(pieces[name].abs().max()), msg=name
            )


@pytest.mark.parametrize('op', OPS)
def test_problems_are_of_the_sizes_that_calls_ask_for(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At full size, without running anything; an encoder's queries are its tokens, whole blocks have no mask."""
    package = choice.sys.modules[f'mmgate.ops.{op}']
    asked: list[str] = []
    monkeypatch.setattr(
        package, 'run', lambda op, backends, arguments, name, work: asked.append(choice.size_class(*work))
    )
    for size in SIZES:
        arguments = problem(op, size, 'float32', 'full', CPU)
        if op == 'ms_deform_attn':
            package.ms_deform_attn(*arguments[:6], reference_points=arguments[8])
            assert (arguments[4].shape[1] == arguments[0].shape[1]) is (size == 'large')
        else:
            package.plug_attention(*arguments[:7])
            assert (arguments[6] is None and arguments[0].shape[2] % 128 == 0) is (size != 'small')
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
import os, time
import mmgate.ops.ms_deform_attn
from mmgate.ops import backend

def crash(*_): os.abort()
def hang(*_): time.sleep(100)
def sticky(*_): raise RuntimeError('illegal address')
def refuse(*_): raise ValueError('not for this')

kinds = [backend.Backend(f.__name__, lambda x: None, f) for f in (crash, hang, sticky, refuse)]
torch = backend.find('ms_deform_attn', backend.OPERATORS['ms_deform_attn'], 'torch')
backend.OPERATORS.clear()
backend.register('ms_deform_attn', *kinds, torch)
"""


def test_a_crash_or_a_hang_is_out_and_the_rest_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / 'sitecustomize.py').write_text(BAD)
    monkeypatch.setenv('PYTHONPATH', str(tmp_path) + ':' + str(Path(calibration.__file__).parents[2]))
    kinds = tuple(Backend(x, lambda x: None, lambda x: x) for x in ('crash', 'hang', 'sticky', 'refuse'))
    torch_backend = find('ms_deform_attn', choice.OPERATORS['ms_deform_attn'], 'torch')
    monkeypatch.setattr(calibration, 'OPERATORS', {'ms_deform_attn': (*kinds, torch_backend)})
    rows = list(compare(CPU, ['float32'], 'tiny', limit=20, sizes=('small', 'large')))
    assert [(row.backend, row.size) for row in rows] == [
        (name, size) for name in ('crash', 'hang', 'sticky', 'refuse', 'torch') for size in ('small', 'large')
    ]
    out = {(row.backend, row.size): row.out or '' for row in rows}
    assert all('its process ended with -6' in out['crash', size] for size in ('small', 'large'))
    assert out['hang', 'small'] == 'took longer than 20 s' and out['hang', 'large'] == 'not tried, as it hung before'
    assert (
        out['sticky', 'large'] == 'RuntimeError: illegal address'
        and out['refuse', 'small'] == 'ValueError: not for this'
    )
    assert not out['torch', 'small'] and not out['torch', 'large'] and all(rows[-1].ms.values())
