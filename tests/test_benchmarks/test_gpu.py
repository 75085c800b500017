"""``make gpu``: its rows, its table, and what it says of steps that cannot run, fail or take too long."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mmgate.benchmarks import gpu, ops_cuda
from mmgate.ops.ms_deform_attn import triton as sampler
from mmgate.ops.plug_attention import triton as dense


def test_steps_are_told_as_they_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    rows = ['op,x,mode,provider,metric,unit,y_50,ratio_to_peer', 'a,b,c,d,time,ms,7.5,2']
    writes = f"import sys; open(sys.argv[1], 'w').write('\\n'.join({rows}))"
    python = [sys.executable, '-c']
    steps = dict(
        written=(60, lambda args, file: [*python, writes, str(file.resolve())]),
        missing=(60, lambda args, file: 'there is no such package'),
        broken=(60, lambda args, file: [*python, 'raise SystemExit(3)']),
        hung=(1, lambda args, file: [*python, 'import time; time.sleep(60)']),
    )
    monkeypatch.setattr(gpu, 'STEPS', steps)
    assert gpu.main(['--device', 'cpu', '--out', str(tmp_path)]) == 1
    page = (tmp_path / 'CPU.md').read_text()
    for line in (
        '| written | done |',
        '| a | b | c | d | time | 7.5 ms | 2 |',
        '- missing: could not run: there is no such package',
        '- broken: failed with 3, see CPU.broken.log',
        '- hung: failed: not done after 1 s, see CPU.hung.log',
    ):
        assert line in page
    assert 'hung: failed' in capsys.readouterr().out


def test_all_steps_together_end_in_eight_minutes() -> None:
    assert sum(limit for limit, _ in gpu.STEPS.values()) < 480
    assert all((gpu.ROOT / path).is_file() for pair in gpu.CONFIGS for path in pair if '::' not in path)


@pytest.mark.parametrize('step, providers', [('step', 4), ('sampler', 5), ('plug', 4), ('switches', 10)])
def test_rows_of_a_step(step: str, providers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter; what a step changes in the kernels' modules is set back."""
    pytest.importorskip('triton', minversion='3.2')
    if torch.cuda.is_available():
        pytest.skip('the kernels are compiled here')
    monkeypatch.setattr(ops_cuda, 'COPY', 1 << 10)
    monkeypatch.setattr(gpu, 'TINY_LEVELS', [(2, 2)])
    before = sampler.PIECES, sampler.NUM_WARPS, dense.blocks_for
    gpu._write_rows(gpu.ROWS[step]('cpu', True), tmp_path / 'x.csv')
    with open(tmp_path / 'x.csv') as file:
        rows = list(csv.DictReader(file))
    assert len({row['provider'] for row in rows}) == providers
    assert all(float(row['y_50']) > 0 for row in rows if row['metric'] == 'time')
    assert before == (sampler.PIECES, sampler.NUM_WARPS, dense.blocks_for)
