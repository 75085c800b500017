"""``make gpu``: its rows, its table, and what it says of steps that cannot run, fail or take too long."""

from __future__ import annotations

import csv
import sys
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mmgate.benchmarks import gpu, ops_cuda, switches
from mmgate.ops.ms_deform_attn import triton as fused
from mmgate.ops.plug_attention import blocks as dense_blocks
from mmgate.ops.plug_attention import triton as dense


def test_steps_are_told_as_they_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    rows = ['op,x,mode,provider,metric,unit,y_50,ratio_to_peer', 'a,b,c,d,time,ms,7.5,2']
    writes = f"import sys; open(sys.argv[1], 'w').write('\\n'.join({rows}))"
    python = [sys.executable, '-c']
    partly = "import warnings; warnings.warn('x is left out, forward: because'); raise SystemExit(0)"
    steps = dict(
        partly=(60, lambda args, file: [*python, partly]),
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
        '- partly: x is left out, forward: because',
    ):
        assert line in page
    printed = capsys.readouterr().out
    assert 'hung: failed' in printed and page in printed


def test_all_steps_together_end_in_eight_minutes() -> None:
    assert sum(limit for limit, _ in gpu.STEPS.values()) < 480
    assert all((gpu.ROOT / path).is_file() for pair in gpu.CONFIGS for path in pair if '::' not in path)


@pytest.mark.parametrize(
    'step, providers', [('step', 4), ('sampler', 4), ('plug', 4), ('sampler-switches', 3), ('plug-switches', 3)]
)
@pytest.mark.filterwarnings('ignore:.* is left out:UserWarning')
def test_rows_of_a_step(step: str, providers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter; what cannot run here is left out and said."""
    pytest.importorskip('triton', minversion='3.2')
    if torch.cuda.is_available():
        pytest.skip('the kernels are compiled here')
    monkeypatch.setattr(ops_cuda, '_flex', lambda gml: no_compiler)
    for op in ('SAMPLER', 'PLUG'):
        monkeypatch.setattr(switches, op, dict(islice(getattr(switches, op).items(), 2)))
    gpu._write_rows(gpu.ROWS[step]('cpu', True), tmp_path / 'x.csv')
    with open(tmp_path / 'x.csv') as file:
        rows = list(csv.DictReader(file))
    assert len({row['provider'] for row in rows}) == providers
    assert len({tuple(row[key] for key in ('x', 'provider', 'mode', 'metric')) for row in rows}) == len(rows)
    assert all(float(row['y_50']) > 0 for row in rows if row['metric'] == 'time')


def no_compiler(*inputs: Any) -> Any:
    raise RuntimeError('there is no compiler')


@pytest.mark.parametrize('arch', [80, 90])
def test_every_switch_changes_what_is_launched(arch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for those by which this GPU is launched anyway; and nothing is changed outside of it."""
    pytest.importorskip('triton', minversion='3.2')
    launched: list[Any] = []

    def note(kernel: Any, *_: Any, **constants: Any) -> None:
        launched.append((hasattr(kernel, 'configs'), constants))

    for module in (fused, dense):
        monkeypatch.setattr(module, 'launch', note)
        monkeypatch.setattr(module, 'interpreted', lambda: False)
    for module in (fused.blocks, dense_blocks):
        monkeypatch.setattr(module, 'interpreted', lambda: False)
        monkeypatch.setattr(module, 'target_of', lambda device: SimpleNamespace(backend='cuda', arch=arch))

    def constants(run: Any, inputs: list[Tensor]) -> list[Any]:
        launched.clear()
        run(*inputs).sum().backward()
        return list(launched)

    same = []
    for op, changes in (('ms_deform_attn', switches.SAMPLER), ('plug_attention', switches.PLUG)):
        monkeypatch.setattr(switches, '_beside', lambda op, run, changes, x, inputs, repetitions: (run, inputs))
        run, inputs = gpu.switch_rows(op, 'cpu', True)
        inputs = [x.bfloat16().requires_grad_() if x.is_floating_point() else x for x in inputs]
        usual = constants(run, inputs)
        for name, within in changes.items():
            with within():
                same += [name] if constants(run, inputs) == usual else []
        assert constants(run, inputs) == usual
    pieces = '4 pieces, 1 channel a lane' if arch == 80 else '2 pieces, 4 channels a lane'
    assert same == [pieces, 'two heads a program']
