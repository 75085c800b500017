"""``make gpu``: its commands, its page, and what it says of steps that cannot run, fail or take too long."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import ROOT, tool

gpu = tool('gpu', 'dev')


def test_steps_are_told_as_they_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    rows = ['op,x,mode,provider,metric,unit,y_50,ratio_to_peer', 'a,b,c,d,time,ms,7.5,2']
    steps = dict(
        written=(60, ['-c', f'open("OUT/x.csv", "w").write({chr(10).join(rows)!r})']),
        memcheck=(60, ['-c', "import os; os.environ['PYTORCH_NO_CUDA_MEMORY_CACHING']"]),  # it sees single tensors
        training=(60, ['-c', '']),
        broken=(60, ['-c', 'raise SystemExit(3)']),
        hung=(1, ['-c', 'import time; time.sleep(60)']),
    )
    monkeypatch.setattr(gpu, 'PARTS', dict(one=steps))
    monkeypatch.setattr(gpu, 'SANITIZER', sys.executable)
    monkeypatch.setattr(gpu, 'why_not', lambda package: f'there is no {package}')
    cuda = SimpleNamespace(is_available=lambda: True, get_device_name=lambda *_: 'A GPU')
    monkeypatch.setattr(gpu, 'torch', SimpleNamespace(cuda=cuda, device=lambda name: name))
    monkeypatch.setattr(gpu, 'describe_machine', lambda device: 'a machine')
    assert gpu.main(['--out', str(tmp_path)]) == 1
    page = (tmp_path / 'A-GPU/all.md').read_text()
    for line in (
        '# a machine',
        '| written | done |',
        '| memcheck | done |',
        '| training | could not run: there is no mmengine |',
        '| broken | failed with 3, see broken.log |',
        '| hung | failed: not done after 1 s, see hung.log |',
        '| a | b | c | d | time | 7.5 ms | 2 |',
    ):
        assert line in page
    assert page in capsys.readouterr().out


def test_a_part_ends_in_eight_minutes_and_runs_what_is_there() -> None:
    for steps in gpu.PARTS.values():
        assert sum(limit for limit, _ in steps.values()) <= 480
        for step, (_, words) in steps.items():
            files = [word for word in words if word.endswith('.py') and '::' not in word]
            assert all((ROOT / file).is_file() for file in files) and (files or step == 'doctor')
            if step in gpu.SANITIZERS:
                # What kernels wrote that initcheck does not watch would count as not written.
                assert ('kernel_substring=backward_kernel' in words) is (step != 'initcheck')
