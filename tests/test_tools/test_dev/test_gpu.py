"""``make gpu``: its rows, its table, and what it says of steps that cannot run, fail or take too long."""

from __future__ import annotations

import csv
import sys
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import switches
import torch
from conftest import ROOT, tool

from mmgate.benchmarks import ops
from mmgate.benchmarks.measure import write_csv
from mmgate.ops import native

gpu = tool('gpu', 'dev')


def test_steps_are_told_as_they_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    rows = ['op,x,mode,provider,metric,unit,y_50,ratio_to_peer', 'a,b,c,d,time,ms,7.5,2']
    writes = f"import sys; open(sys.argv[1], 'w').write('\\n'.join({rows}))"
    partly = "import warnings; warnings.warn('x is left out, forward: because'); raise SystemExit(0)"
    python = [sys.executable, '-c']
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


@pytest.mark.parametrize('device', ['cpu', 'cuda'])
def test_steps_run_test_files_that_are_there(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu.shutil, 'which', lambda name: name)
    args = SimpleNamespace(device=device)
    commands = [gpu._tests(op, args, Path('rows.csv')) for op in gpu.OPS]
    if device == 'cuda':
        commands.append(gpu._sanitizer('memcheck', args, Path('rows.csv')))
    for command in commands:
        files = [part for part in command if part.endswith('.py')]
        assert files and all((ROOT / file).is_file() for file in files)


def test_a_part_appends_to_what_others_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header = 'op,x,mode,provider,metric,unit,y_50,ratio_to_peer'
    (tmp_path / 'CPU.csv').write_text(f'{header}\na,b,c,d,time,ms,7.5,2\n')
    monkeypatch.setattr(gpu, 'STEPS', dict(one=(60, lambda args, file: [sys.executable, '-c', ''])))
    monkeypatch.setattr(gpu, 'PARTS', dict(sampler=['one'], plug=['two']))
    assert gpu.main(['--device', 'cpu', '--out', str(tmp_path), '--part', 'sampler']) == 0
    page = (tmp_path / 'CPU.sampler.md').read_text()
    assert '| one | done |' in page
    assert '| a | b | c | d | time | 7.5 ms | 2 |' in page


def test_memcheck_sees_single_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu.shutil, 'which', lambda name: '/bin/compute-sanitizer')
    args = SimpleNamespace(device='cuda', tiny=False)
    command = gpu._sanitizer('memcheck', args, tmp_path / 'x.csv')
    assert command[:3] == ['/bin/compute-sanitizer', '--tool', 'memcheck']
    assert 'kernel_substring=backward_kernel' in command
    others = gpu._sanitizer('initcheck', args, tmp_path / 'x.csv')
    assert not [part for part in others if 'kernel' in part], 'what other kernels wrote would count as not written'
    shows = [sys.executable, '-c', "import os; print(os.environ.get('PYTORCH_NO_CUDA_MEMORY_CACHING'))"]
    log = tmp_path / 'x.log'
    for step, shown in (('memcheck', '1'), ('sampler', 'None')):
        assert gpu._run(shows, 60, log, step) == 'done'
        assert log.read_text().strip() == shown


def test_each_part_ends_in_eight_minutes(tmp_path: Path) -> None:
    assert sorted(step for part in gpu.PARTS.values() for step in part) == sorted(gpu.STEPS)
    for steps in gpu.PARTS.values():
        assert sum(gpu.STEPS[step][0] for step in steps) <= 480
    assert all((gpu.ROOT / path).is_file() for *pair, _ in gpu.CONFIGS for path in pair if '::' not in path)
    args = SimpleNamespace(device='cpu', tiny=True)
    commands = {step: command(args, tmp_path / 'x.csv') for step, (_, command) in gpu.STEPS.items()}
    assert [step for step, words in commands.items() if isinstance(words, str)] == list(gpu.SANITIZERS)


@pytest.mark.parametrize(
    'step, providers',
    [
        ('step', 4),
        ('plug', 5 if native.why_unavailable() is None else 4),
        ('plug-chunks', 3),
        ('plug_attention', 3),
        pytest.param('sampler', 4, marks=pytest.mark.slow),
        pytest.param('ms_deform_attn', 3, marks=pytest.mark.slow),
    ],
)
@pytest.mark.filterwarnings('ignore:.* is left out:UserWarning')
def test_rows_of_a_step(step: str, providers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter; what cannot run here is left out and said."""
    pytest.importorskip('triton', minversion='3.2')
    if torch.cuda.is_available():
        pytest.skip('the kernels are compiled here')
    monkeypatch.setattr(ops, '_flex', lambda gml: no_compiler)
    kept = {op: dict(islice(changes.items(), 2)) for op, changes in switches.SWITCHES.items()}
    monkeypatch.setattr(switches, 'SWITCHES', kept)
    rows = gpu.ROWS[step]('cpu', True) if step in gpu.ROWS else switches.rows(step, 'cpu', True)
    for _ in range(2):  # a step appends to what others wrote
        written = write_csv(rows, tmp_path / 'x.csv', append=True)
        rows = iter(written)
    with open(tmp_path / 'x.csv') as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * len(written) and len({row['provider'] for row in rows}) == providers
    assert len({tuple(row[key] for key in ('x', 'provider', 'mode', 'metric')) for row in rows}) == len(written)
    assert all(float(row['y_50']) > 0 for row in rows if row['metric'] == 'time')
    saved = {row['provider']: float(row['y_50']) for row in rows if row['metric'] == 'saved'}
    peer = dict(sampler='grid_sample', plug='eager').get(step)
    assert bool(saved) is bool(peer) and (not peer or saved['triton'] <= saved[peer])


def test_switches_change_launches_inside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward; outside of them kernels are launched as before."""
    pytest.importorskip('triton', minversion='3.2')
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    modules = (switches.triton_deformable, switches.triton_dense)
    for op, module, kernels in zip(switches.SWITCHES, modules, (2, 3), strict=True):
        seen: list[int | None] = []
        monkeypatch.setattr(module, 'launch', lambda *_, kept=seen, **given: kept.append(given.get('num_warps')))
        run, inputs = switches.problem(op, device, tiny=True)
        inputs[0].requires_grad_()
        with switches.SWITCHES[op]['8 warps']():
            run(*inputs).sum().backward()
        run(*inputs).sum().backward()
        assert [warps for warps in seen if warps] == [8] * kernels + [4] * kernels


def no_compiler(*inputs: Any) -> Any:
    raise RuntimeError('there is no compiler')
