"""``python -m mmgate.doctor``: the page, its exit status and the times; without any mm package, too."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
from conftest import ROOT, run_python
from torch import Tensor

from mmgate import doctor
from mmgate.benchmarks import backends
from mmgate.ops import backend as choice
from mmgate.ops import triton_backend
from mmgate.ops.backend import Backend
from mmgate.ops.deformable import grid_sample
from mmgate.ops.deformable.samples import Samples
from mmgate.ops.dense import chunked

BLOCKED = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] in ('mmengine', 'mmcv', 'mmdet', 'mmseg', 'mmpretrain'):
            raise ModuleNotFoundError(f'No module named {name!r}', name=name)

sys.meta_path.insert(0, Absent())
"""
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


@pytest.mark.parametrize('op', choice.OPERATORS)
def test_sizes_that_are_timed_are_real_ones(op: str) -> None:
    examples = backends.large_examples(op, 'bfloat16', torch.device('cpu'))
    assert len(examples) == 2 and all(x.inputs[0].dtype is torch.bfloat16 for x in examples.values())
    assert max(x.inputs[0].numel() for x in examples.values()) >= 2**21


def test_a_build_that_fails_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A compiler that fails, or none, is said, and so is a library that does not load."""
    monkeypatch.setenv('MMGATE_NATIVE', str(tmp_path / 'native.so'))
    monkeypatch.setenv('CXX', 'false')
    assert doctor.main(['--build']) == 1 and 'is not compiled: false fails' in capsys.readouterr().out
    monkeypatch.delenv('CXX')
    monkeypatch.setattr(backends.library.build, 'COMPILERS', ('no-such-compiler',))
    assert doctor.main(['--build']) == 1 and 'there is no C++ compiler' in capsys.readouterr().out
    monkeypatch.setattr(backends.library.build, 'build', lambda: (tmp_path / 'native.so').write_text('no library'))
    assert doctor.main(['--build']) == 1 and 'native.so does not load' in capsys.readouterr().out
    backends.library.load.cache_clear()


def test_torch_alone_is_enough(tmp_path: Path) -> None:
    """With a finder that knows of no mm package."""
    (tmp_path / 'sitecustomize.py').write_text(BLOCKED)
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = run_python('-c', ALONE, ROOT / 'tools/dev/gpu.py', PYTHONPATH=paths, TRITON_INTERPRET='0')
    assert '--part' in done.stdout
    compared = [line.split() for line in done.stdout.partition('gradient\n')[2].splitlines()]
    assert {backend for _, _, backend, *_ in compared} - {'native'} == {'grid_sample', 'torch', 'chunked'}
