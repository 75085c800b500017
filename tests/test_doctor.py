"""``python -m mmgate.doctor``: the page, its exit status and the times; without any mm package, too."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from conftest import ROOT, run_python
from helpers.environments import HIDDEN
from torch import Tensor

from mmgate import doctor
from mmgate.benchmarks import backends
from mmgate.ops import backend as choice
from mmgate.ops import triton_backend
from mmgate.ops.backend import Backend
from mmgate.ops.deformable import grid_sample
from mmgate.ops.deformable.samples import Samples
from mmgate.ops.dense import chunked

# The script of the GPU machines says how it is used, then the doctor is asked.
ALONE = """
import runpy, sys
sys.argv = [sys.argv[1], '--help']
try:
    runpy.run_path(sys.argv[0], run_name='__main__')
except SystemExit as end:
    assert not end.code
sys.argv = ['doctor', '--device', 'cpu']
runpy.run_module('mmgate.doctor', run_name='__main__', alter_sys=True)
"""


@pytest.fixture(autouse=True)
def _kernels_are_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for users, who have no interpreter of Triton on."""
    monkeypatch.setattr(triton_backend, 'interpreted', lambda: False)


def test_the_page_says_what_runs_and_agrees(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A user's own choice by a variable changes nothing."""
    monkeypatch.setenv('MMGATE_PLUG_ATTENTION', 'torch')
    monkeypatch.setattr(chunked, 'chunk_on', lambda device: 1000)  # so that the backends differ
    assert doctor.main(['--device', 'cpu']) == 0
    text = capsys.readouterr().out
    assert 'CUDA tensors' in text and torch.__version__ in text
    compared = text.partition('Beside the float64')[2]
    for name in ('grid_sample', 'chunked', 'torch'):
        assert re.search(rf'float32 +{name} +agrees', compared), name
    assert 'ms forward' not in text


@pytest.mark.parametrize('dtype', ['float32', 'float16', 'bfloat16'])
def test_what_is_wrong_or_fails_is_said(
    dtype: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def of_a_stretched_gate(samples: Samples) -> Tensor:
        return grid_sample.attend(samples._replace(gate=1.2 * samples.gate))

    def raises(samples: Samples) -> Tensor:
        raise RuntimeError('no kernel image\nand more')

    kinds = (Backend('wrong', of_a_stretched_gate), Backend('broken', raises), *choice.OPERATORS['ms_deform_attn'])
    monkeypatch.setitem(choice.OPERATORS, 'ms_deform_attn', kinds)
    monkeypatch.setattr(choice, '_logged', set())
    assert doctor.main(['--device', 'cpu', '--dtype', dtype]) == 1
    text = capsys.readouterr().out
    assert re.search(r'wrong +(the output|the gradient of argument \d) is off by', text)
    assert re.search(r'broken +RuntimeError: no kernel image\n', text) and 'grid_sample  agrees' in text


def test_times_are_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(backends, 'SECONDS', 0.0)
    monkeypatch.setattr(backends, 'large_examples', lambda *args: {'tiny': backends.small_example(*args)})
    assert doctor.main(['--device', 'cpu', '--time']) == 0
    timed = capsys.readouterr().out.partition('ms forward, forward+backward')[2]
    assert re.search(r'ms_deform_attn +float32 +tiny +grid_sample +[\d.e+]+ +[\d.e+]+\n', timed)
    assert re.search(r'plug_attention +float32 +tiny +chunked +[\d.e+]+ +[\d.e+]+\n', timed)


def test_a_build_that_fails_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A compiler that fails, or none, leaves nothing; a library that does not load is said, too."""
    monkeypatch.setenv('MMGATE_NATIVE', str(tmp_path / 'native.so'))
    monkeypatch.setattr(backends.library.build, 'COMPILERS', ('no-such-compiler',))
    for compiler, reason in (
        ('false --option', 'is not compiled: false fails'),
        ('no-such-compiler', 'no-such-compiler does not run: '),
        ('', 'there is no C++ compiler: none of no-such-compiler is on the path, and CXX is empty'),
    ):
        monkeypatch.setenv('CXX', compiler)
        assert doctor.main(['--build']) == 1 and reason in capsys.readouterr().out
        assert not list(tmp_path.iterdir())
    monkeypatch.setattr(backends.library.build, 'build', lambda: (tmp_path / 'native.so').write_text('no library'))
    assert doctor.main(['--build']) == 1 and 'native.so does not load' in capsys.readouterr().out
    backends.library.load.cache_clear()


def test_torch_alone_is_enough() -> None:
    done = run_python('-c', HIDDEN + ALONE, ROOT / 'tools/dev/gpu.py', PYTHONPATH=str(ROOT), TRITON_INTERPRET='0')
    assert '--part' in done.stdout
    compared = [line.split() for line in done.stdout.partition('gradient\n')[2].splitlines()]
    assert {backend for _, _, backend, *_ in compared} - {'native'} == {'grid_sample', 'torch', 'chunked'}
