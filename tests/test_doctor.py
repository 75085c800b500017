"""``python -m mmgate.doctor``: the page, its JSON and its exit status; the kernels in the interpreter."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import torch
from mmgate.ops.dispatch import Backend
from torch import Tensor

from mmgate import doctor
from mmgate.ops.plug_attention import problems


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problems, 'ROWS', 17)
    monkeypatch.setattr(problems, 'COLUMNS', 18)


def keep(monkeypatch: pytest.MonkeyPatch, op: str, *names: str, more: tuple[Backend, ...] = ()) -> None:
    package = sys.modules[f'mmgate.ops.{op}']
    monkeypatch.setattr(package, 'BACKENDS', tuple(b for b in package.BACKENDS if b.name in names) + more)


def test_page_and_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    keep(monkeypatch, 'ms_deform_attn', 'mmcv', 'cpu', 'grid_sample', 'torch')
    keep(monkeypatch, 'plug_attention', 'chunked', 'torch')
    assert doctor.main(['--device', 'cpu', '--shapes', 'small']) == 0
    text = capsys.readouterr().out
    for expected in ('CUDA tensors', 'grid_sample', 'agrees', 'DINO decoder', 'forward+backward', torch.__version__):
        assert expected in text
    assert doctor.main(['--device', 'cpu', '--shapes', 'none', '--json', '--dtype', 'bfloat16']) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert report['packages']['torch'] and not report['times']
    assert {row['backend'] for row in report['agreement']} == {'cpu', 'grid_sample', 'torch', 'chunked'}


def test_exit_status_of_what_disagrees(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def half(value: Tensor, *rest: Any) -> Tensor:
        return 0.5 * next(b for b in sys.modules['mmgate.ops.ms_deform_attn'].BACKENDS if b.name == 'torch').run(
            value, *rest
        )

    keep(monkeypatch, 'ms_deform_attn', 'torch', more=(Backend('half', lambda value: None, half),))
    keep(monkeypatch, 'plug_attention', 'torch')
    assert doctor.main(['--device', 'cpu', '--shapes', 'none']) == 1
    assert 'the output is off by' in capsys.readouterr().out


@pytest.mark.slow  # test_dispatch.py has each kernel's small problem
def test_kernels_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip('triton', minversion='3.2')
    if torch.cuda.is_available():
        pytest.skip('the kernels are compiled here')
    keep(monkeypatch, 'ms_deform_attn', 'torch', 'triton')
    keep(monkeypatch, 'plug_attention', 'torch', 'triton')
    rows = list(doctor._agreement(torch.device('cpu'), ['float32']))
    assert {(row['op'], row['backend']) for row in rows} >= {('ms_deform_attn', 'triton'), ('plug_attention', 'triton')}
    assert not any(row['disagrees'] for row in rows)
