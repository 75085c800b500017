"""``python -m mmgate.doctor``: the page, its exit status and the calibration; without any mm package, too."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import ROOT, run_python

from mmgate import doctor
from mmgate.benchmarks.calibration import Row
from mmgate.ops import backend as choice

BLOCKED = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] in ('mmengine', 'mmcv', 'mmdet', 'mmseg', 'mmpretrain'):
            raise ModuleNotFoundError(f'No module named {name!r}', name=name)

sys.meta_path.insert(0, Absent())
"""


def rows(out: str | None = None) -> list[Row]:
    ms, names = {'forward': 1.0, 'forward+backward': 2.5}, ('grid_sample', 'torch')
    found = [(op, b.name) for op, backends in choice.OPERATORS.items() for b in backends if b.name in names]
    return [Row(op, 'float32', 'large', name, ms, out if name == 'torch' else None) for op, name in found]


@pytest.fixture(autouse=True)
def _rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, 'compare', lambda *args: iter(rows()))
    monkeypatch.setenv('MMGATE_CALIBRATION', str(tmp_path / 'calibration.json'))
    choice.winners.cache_clear()


def test_the_page_says_what_runs_and_agrees(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(['--device', 'cpu']) == 0
    text = capsys.readouterr().out
    for expected in ('CUDA tensors', 'grid_sample', 'agrees', 'nothing is calibrated here', torch.__version__):
        assert expected in text
    assert not Path(choice.path()).exists() and '2.5' not in text.partition('Beside')[2]


def test_calibration_and_exit_status(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(['--device', 'cpu', '--calibrate', '--sizes', 'tiny']) == 0  # which shows nothing of real calls
    assert '2.5' in capsys.readouterr().out and not Path(choice.path()).exists()
    assert doctor.main(['--device', 'cpu', '--calibrate']) == 0
    text = capsys.readouterr().out
    assert '2.5' in text and 'torch.float32 large      grid_sample' in text
    assert choice.winners('ms_deform_attn', 'cpu', None) == {'torch.float32 large': 'grid_sample'}
    monkeypatch.setattr(doctor, 'compare', lambda *args: iter(rows('the output is off by 1.0e+00')))
    assert doctor.main(['--device', 'cpu']) == 1
    assert 'the output is off by' in capsys.readouterr().out


def test_a_calibration_that_is_ended_leaves_what_it_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a time limit ends it: rows are printed, and the first operator's choices kept while the second runs."""

    def ended(*args: object) -> Iterator[Row]:
        first, *others = rows()
        yield first
        assert first.op == 'ms_deform_attn' and first.backend in capsys.readouterr().out.splitlines()[-1]
        for row in others:
            yield row
            if row.op != first.op:
                raise KeyboardInterrupt

    monkeypatch.setattr(doctor, 'compare', ended)
    with pytest.raises(KeyboardInterrupt):
        doctor.main(['--device', 'cpu', '--calibrate'])
    assert '2.5' in capsys.readouterr().out
    assert choice.winners('ms_deform_attn', 'cpu', None) == {'torch.float32 large': 'grid_sample'}
    assert choice.winners('plug_attention', 'cpu', None) == {}


def test_a_build_that_fails_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A compiler that fails, or none, is said, and so is a library that does not load."""
    monkeypatch.setenv('MMGATE_NATIVE', str(tmp_path / 'native.so'))
    monkeypatch.setenv('CXX', 'false')
    assert doctor.main(['--build']) == 1 and 'is not compiled: false fails' in capsys.readouterr().out
    monkeypatch.delenv('CXX')
    monkeypatch.setattr(doctor.library.build, 'COMPILERS', ('no-such-compiler',))
    assert doctor.main(['--build']) == 1 and 'there is no C++ compiler' in capsys.readouterr().out
    monkeypatch.setattr(doctor.library.build, 'build', lambda: (tmp_path / 'native.so').write_text('no library'))
    assert doctor.main(['--build']) == 1 and 'native.so does not load' in capsys.readouterr().out
    doctor.library.load.cache_clear()


def test_torch_alone_is_enough(tmp_path: Path) -> None:
    """With a finder that knows of no mm package; the doctor's own processes as well."""
    (tmp_path / 'sitecustomize.py').write_text(BLOCKED)
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    for arguments in ([ROOT / 'tools/dev/gpu.py', '--help'], ['-m', 'mmgate.doctor', '--device', 'cpu']):
        done = run_python(*arguments, PYTHONPATH=paths, TRITON_INTERPRET='0')
    compared = [line.split() for line in done.stdout.partition('gradient\n')[2].partition('\n\n')[0].splitlines()]
    assert {backend for _, _, _, backend, *_ in compared} - {'native'} == {'cpu', 'grid_sample', 'torch', 'chunked'}
