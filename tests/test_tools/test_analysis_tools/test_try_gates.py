"""A trial from a vanilla checkpoint to the table in three commands, interrupted and gone on with."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, run_python, tool
from helpers.small_demo import VANILLA, run, write_demo
from mmengine.config import Config

from mmgate.analysis.loading import load_model
from mmgate.benchmarks import gate_trial
from mmgate.errors import ConfigError
from mmgate.mm import cli

try_gates = tool('try_gates')
PLUG = 'encoder.layers.*.self_attn=PLuGMultiScaleDeformableAttention'
TOOLS = ROOT / 'tools/analysis_tools'
SHORT = ['vanilla.py', '--checkpoint', 'start.pth', '--gate', PLUG, '--out', 'trial', '--validations', '1']


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with data, a vanilla config, and a checkpoint."""
    monkeypatch.chdir(tmp_path)
    write_demo(tmp_path)
    weights = load_model(Config.fromfile('vanilla.py'), 'untrained').model.state_dict()
    torch.save(dict(state_dict=weights), 'start.pth')
    return tmp_path


def run_in_this_process(command: list[str], **options: Any) -> None:
    """Stand for ``run_tool``."""
    run(getattr(cli, command[0]), *command[1:])


def draw_in_this_process(call: list[str], log: Path | None) -> None:
    """Stand for ``run_python``."""
    if cli.main(tool(Path(call[0]).stem).main, call[1:]):
        raise ConfigError('it\nrefuses\n(log)')


def check_trial(said: str, seeds: int) -> None:
    """A trial's folder has the rows of its runs, and a page that explains itself and needs no network."""
    table = Path('trial/table.md').read_text()
    assert table in said and '| start | 1 |' in table and f'| plug | {seeds} |' in table
    assert 'gates moved' in table and '| visible | time | memory |' in table
    rows = list(csv.DictReader(Path('trial/results.csv').read_text().splitlines()))
    expected = [(name, str(seed)) for name in ('vanilla', 'plug') for seed in range(seeds)]
    assert [(row['name'], row['seed']) for row in rows] == [('start', ''), *expected]
    html = Path('trial/index.html').read_text()
    assert html.count('<img') >= 4 and 'sampling points' in html and not re.search(r'(src|href)="(?!data:|#)', html)
    # The page begins with the conclusion, explains the columns, and its commands can be pasted.
    assert html.index('plug against vanilla') < html.index('<table>') < html.index('Gates moved is')
    assert 'plot_sampling_points.py trial/vanilla.py' in html and f'--gate &#x27;{PLUG}&#x27; --max-images' in html
    assert 'starts as vanilla' in html and 'A figure with a plus is what gates add' in html
    # A pair starts alike and sees the same images: the first losses agree to the gates' rounding.
    logs = [next(Path(f'trial/{name}/seed0').glob('*/vis_data/scalars.json')) for name in ('vanilla', 'plug')]
    losses = [[row['loss'] for row in map(json.loads, log.read_text().splitlines()) if 'loss' in row] for log in logs]
    assert losses[0][0] == pytest.approx(losses[1][0], rel=1e-4)


def test_from_a_checkpoint_to_the_table(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first command prints the gate of the second; a run with a result is not repeated."""
    assert cli.main(tool('list_attention').main, ['vanilla.py']) == 0
    assert f"--gate '{PLUG}'" in capsys.readouterr().out
    monkeypatch.setattr(gate_trial, 'run_tool', run_in_this_process)
    monkeypatch.setattr(gate_trial, 'run_python', draw_in_this_process)
    arguments = [*SHORT, '--seeds', '1', '--iters', '2']
    assert cli.main(try_gates.main, arguments) == 0
    said = capsys.readouterr().out
    assert '2 models with 1 seed go on from start.pth, for 2 iterations each' in said
    assert "gates learn at 20 times the model's rate" in said and 'run 3 of 3: plug, seed 0; 1 to do' in said
    check_trial(said, seeds=1)
    # The study that it saved is the same trial, of which nothing is left to do; another length is another trial.
    assert cli.main(tool('study').main, ['trial/study.py', '--out', 'trial']) == 0
    again = capsys.readouterr().out
    assert 'run ' not in again.split('| |')[0] and '| plug | 1 |' in again
    assert cli.main(try_gates.main, [*arguments[:-1], '3']) == 2
    assert 'runs in trial are of another trial: iters: 2 -> 3. ' in capsys.readouterr().err


@pytest.mark.slow  # a process for each of its commands
def test_a_trial_in_two_processes_is_stopped_and_goes_on(project: Path) -> None:
    """By Ctrl-C in its third run, as a terminal sends it to all processes."""
    arguments = [*SHORT, '--seeds', '1', '--iters', '4', '--launcher', 'pytorch', '--processes', '2']
    planned = run_python(TOOLS / 'try_gates.py', *arguments, '--plan-only', cwd=project).stdout
    assert '2 models with 1 seed go on from start.pth, for 4 iterations each, in 2 processes' in planned
    assert '| yes |' in planned and not list((project / 'trial').glob('*/seed*'))
    call = [sys.executable, '-W', 'ignore', str(TOOLS / 'try_gates.py'), *arguments]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    process = subprocess.Popen(call, cwd=project, start_new_session=True, **pipes)
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and not list(project.glob('trial/plug/seed0/*/*.log')):
        time.sleep(0.2)
        assert process.poll() is None, process.communicate()[0]
    os.killpg(process.pid, signal.SIGINT)
    said, _ = process.communicate(timeout=120)
    first = project / 'trial/vanilla/seed0/result.json'
    assert process.returncode == 130 and 'the same command goes on' in said and first.is_file(), said
    finished = first.stat().st_mtime_ns
    done = run_python(TOOLS / 'try_gates.py', *arguments, cwd=project).stdout
    assert first.stat().st_mtime_ns == finished and 'run 3 of 3: plug, seed 0; 1 to do' in done
    assert 'Measuring' not in done
    check_trial(done, seeds=1)
    dumped = Config.fromfile(str(project / 'trial/plug/seed0/vanilla.py'))
    assert dumped.model.type == 'mmgate.Gated' and dumped.load_from.endswith('.pth')


@pytest.mark.parametrize(
    ('gates', 'names'),
    [
        (['a=PLuGMultiheadAttention', 'b=PLuGMultiheadAttention'], ['plug', 'plug__2']),
        (["a=PLuGMultiheadAttention(gml='sum', ratio=0.5)"], ['plug-gml-sum-ratio-0.5']),
        (['a=mmgate.SAGAAttention; b=SDPAGatedMultiheadAttention'], ['saga-sdpagated']),
        (['a=MultiScaleDeformableAttention'], ['operator']),
    ],
)
def test_names(gates: list[str], names: list[str]) -> None:
    assert gate_trial.names_of(gates) == names


def test_gates_have_the_rate_of_their_class_unless_one_is_given() -> None:
    """PLuG's gates hardly move at the model's rate; the SDPA gate moves far enough at it."""
    gates = [PLUG, 'a=SDPAGatedMultiheadAttention(init="identity", act="silu"); b=PLuGMultiheadAttention']
    rates = dict(PLuGDeformableGate=20.0, SDPAGate=1.0, PLuGGate=20.0)
    assert gate_trial.rates_of(gates, None, trained=True) == rates
    assert gate_trial.rates_of(gates, None, trained=False) == dict.fromkeys(rates, 1.0)
    assert gate_trial.rates_of(gates, 5.0, trained=True) == dict.fromkeys(rates, 5.0)


@pytest.mark.parametrize(
    ('argv', 'said'),
    [
        (['--gate', PLUG, '--iters', '0'], 'give 1 or more'),
        (['--gate', PLUG, '--iters', '5', '--epochs', '5'], 'not allowed with'),
        (['--gate', 'a=Nothing'], '--gate a=Nothing'),
        (['--gate', PLUG, '--checkpoint', 'absent.pth'], 'absent.pth does not exist'),
    ],
    ids=lambda x: x[-1] if isinstance(x, list) else '',
)
def test_refused_before_anything_is_measured(
    argv: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        code: Any = cli.main(try_gates.main, [str(VANILLA), *argv])
    except SystemExit as error:  # argparse's own
        code = error.code
    assert code == 2 and said in capsys.readouterr().err and not list(tmp_path.iterdir())
