"""A trial from a vanilla checkpoint to the table in three commands, interrupted and gone on with, and what it says."""

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

import page
import pytest
import torch
from conftest import ROOT, run_python, tool
from helpers.small_demo import CONFIG, DEMO
from mmengine.config import Config
from shapes import write_shapes

from mmgate.analysis.loading import load_model
from mmgate.errors import ConfigError
from mmgate.mm import cli

try_gates = tool('try_gates')
VANILLA = ROOT / 'configs/_base_/deformable-detr-refine_r18_1xb8-12e_shapes.py'
PLUG = 'encoder.layers.*.self_attn=PLuGMultiScaleDeformableAttention'
TOOLS = ROOT / 'tools/analysis_tools'


@pytest.fixture(scope='module')
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data, a vanilla config, and the checkpoint of one epoch of it."""
    folder = tmp_path_factory.mktemp('project')
    write_shapes(folder / 'data/shapes', num_train=4, num_val=2, size=64)
    (folder / 'vanilla.py').write_text(CONFIG.replace(str(DEMO), str(VANILLA)).replace('EPOCHS', '1'))
    run_python(ROOT / 'tools/train.py', 'vanilla.py', '--work-dir', 'start', cwd=folder)
    return folder


def command(*more: str) -> list[str]:
    shared = ['vanilla.py', '--checkpoint', 'start/epoch_1.pth', '--gate', PLUG, '--seeds', '2', '--max-images', '1']
    return [*shared, '--validations', '2', '--repetitions', '1', *more]


def in_this_process(processes: int, command: list[str], quiet: bool = False) -> None:
    """Stand for ``run_tool``: mmengine keeps loggers and visualizers by their names for a process's life."""
    name = command[command.index('--work-dir') + 1].replace('/', '_')
    options = [] if '--cfg-options' in command else ['--cfg-options']
    named = [*command[1:], *options, f'experiment_name={name}', f'visualizer.name={name}']
    assert processes == 1 and cli.main(getattr(cli, command[0]), named) == 0


def draw_in_this_process(command: list[str], *, verbose: bool) -> None:
    """Stand for ``page.run``."""
    if cli.main(tool(command[0]).main, command[1:]):
        raise ConfigError(f'{command[0]} refuses')


def test_from_a_checkpoint_to_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first command prints the gate of the second; a run with a result is not repeated."""
    monkeypatch.chdir(tmp_path)
    write_shapes(tmp_path / 'data/shapes', num_train=2, num_val=1, size=64)
    Path('vanilla.py').write_text(CONFIG.replace(str(DEMO), str(VANILLA)).replace('EPOCHS', '1'))
    weights = load_model(Config.fromfile('vanilla.py'), 'untrained').model.state_dict()
    torch.save(dict(state_dict=weights), 'start.pth')
    assert cli.main(tool('list_attention').main, ['vanilla.py']) == 0
    assert f"--gate '{PLUG}'" in capsys.readouterr().out

    monkeypatch.setattr(try_gates, 'run_tool', in_this_process)
    monkeypatch.setattr(page, 'run', draw_in_this_process)
    arguments = ['vanilla.py', '--checkpoint', 'start.pth', '--gate', PLUG, '--seeds', '1', '--max-images', '1']
    arguments += ['--iters', '2', '--validations', '1', '--repetitions', '1', '--out', 'trial']
    assert cli.main(try_gates.main, arguments) == 0
    said = capsys.readouterr().out
    assert '2 models with 1 seed go on from start.pth, for 2 iterations each' in said
    assert "gates learn at 20 times the model's rate" in said and 'run 2 of 2: plug, seed 0; 1 to do' in said
    table = Path('trial/table.md').read_text()
    assert table in said and '| start | 1 |' in table and '| plug | 1 |' in table
    assert 'gates moved' in table and '| visible | time | memory |' in table
    rows = list(csv.DictReader(Path('trial/results.csv').read_text().splitlines()))
    assert [(row['name'], row['seed']) for row in rows] == [('start', ''), ('vanilla', '0'), ('plug', '0')]
    html = Path('trial/index.html').read_text()
    assert 'sampling points' in html and not re.search(r'(src|href)="(?!data:|#)', html)
    # The page begins with the conclusion, explains the columns, and its commands can be pasted.
    assert html.index('plug against vanilla') < html.index('<table>') < html.index('Gates moved is')
    assert 'plot_sampling_points.py trial/vanilla.py' in html and f'--gate &#x27;{PLUG}&#x27; --max-images' in html
    # The pair starts alike and sees the same images: the first losses agree to the gates' rounding.
    logs = [next(Path(f'trial/{name}/seed0').glob('*/vis_data/scalars.json')) for name in ('vanilla', 'plug')]
    losses = [[row['loss'] for row in map(json.loads, log.read_text().splitlines()) if 'loss' in row] for log in logs]
    assert losses[0][0] == pytest.approx(losses[1][0], rel=1e-4) and len(losses[0]) == 2

    # The study that it saved is the same trial, of which nothing is left to do; another length is another trial.
    assert cli.main(tool('study').main, ['trial/study.py', '--out', 'trial']) == 0
    again = capsys.readouterr().out
    assert 'run ' not in again.split('| |')[0] and '| plug | 1 |' in again
    arguments[arguments.index('--iters') + 1] = '3'
    assert cli.main(try_gates.main, arguments) == 2
    assert 'runs in trial are of another trial: ' in capsys.readouterr().err


@pytest.mark.slow  # a process for each of its 19 commands
def test_three_commands_from_a_vanilla_checkpoint_to_the_table(project: Path) -> None:
    """As a user types them, with a Ctrl-C between, which the test above leaves out."""
    listed = run_python(TOOLS / 'list_attention.py', 'vanilla.py', cwd=project).stdout
    assert f"--gate '{PLUG}'" in listed
    arguments = command('--iters', '4', '--out', 'trial')
    planned = run_python(TOOLS / 'try_gates.py', *arguments, '--plan-only', cwd=project).stdout
    assert '2 models with 2 seeds go on from start/epoch_1.pth, for 4 iterations each' in planned
    assert "gates learn at 20 times the model's rate" in planned and '| yes |' in planned
    assert not list((project / 'trial').glob('*/seed*'))

    # The second run of four is stopped by Ctrl-C, as a terminal sends it to all processes.
    call = [sys.executable, '-W', 'ignore', str(TOOLS / 'try_gates.py'), *arguments]
    process = subprocess.Popen(
        call, cwd=project, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    first = project / 'trial/vanilla/seed0/result.json'
    log = project / 'trial/plug/seed0'
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and not list(log.glob('*/*.log')):
        time.sleep(0.2)
        assert process.poll() is None, process.communicate()[0]
    os.killpg(process.pid, signal.SIGINT)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 130 and 'the same command goes on' in said and first.is_file(), said
    assert 'run 2 of 4: plug, seed 0; 3 to do, about 0:' in said
    finished = first.stat().st_mtime_ns

    done = run_python(TOOLS / 'try_gates.py', *arguments, cwd=project).stdout
    assert first.stat().st_mtime_ns == finished and 'run 2 of 4: plug, seed 0; 3 to do' in done
    assert 'Measuring' not in done
    table = (project / 'trial/table.md').read_text()
    assert table in done and '| start | 1 |' in table and '| plug | 2 |' in table
    assert 'gates moved' in table and '| visible | time | memory |' in table
    assert 'plug against vanilla: no difference was shown' in table
    rows = list(csv.DictReader((project / 'trial/results.csv').open()))
    assert [(row['name'], row['seed']) for row in rows] == [
        ('start', ''), ('vanilla', '0'), ('vanilla', '1'), ('plug', '0'), ('plug', '1')
    ]  # fmt: skip
    html = (project / 'trial/index.html').read_text()
    assert html.count('<img') >= 4 and 'sampling points' in html and not re.search(r'(src|href)="(?!data:|#)', html)
    # The page begins with the conclusion, explains the columns, and its commands can be pasted.
    assert html.index('no difference was shown') < html.index('<table>') < html.index('Gates moved is')
    assert 'plot_sampling_points.py trial/vanilla.py' in html and f'--gate &#x27;{PLUG}&#x27; --max-images' in html
    assert 'starts as vanilla' in html and 'A figure with a plus is what gates add' in html
    assert 'points if each run has a single validation' in html
    dumped = Config.fromfile(str(project / 'trial/plug/seed0/vanilla.py'))
    assert dumped.model.type == 'mmgate.Gated' and dumped.load_from.endswith('.pth')

    # The pairs start alike and see the same images: the first losses agree to the gates' rounding.
    losses = []
    for name in ('vanilla', 'plug'):
        log = sorted((project / f'trial/{name}/seed1').glob('*/vis_data/scalars.json'))[0]
        losses.append([row['loss'] for row in map(json.loads, log.read_text().splitlines()) if 'loss' in row])
    assert losses[0][0] == pytest.approx(losses[1][0], rel=1e-4) and len(losses[0]) == 4
    # The study that it saved is the same trial.
    again = run_python(TOOLS / 'study.py', 'trial/study.py', '--out', 'trial', cwd=project).stdout
    assert 'run ' not in again.split('| |')[0] and '| plug | 2 |' in again

    # Another length is another trial.
    other = run_python(TOOLS / 'try_gates.py', *command('--iters', '6', '--out', 'trial'), cwd=project, fails=True)
    assert 'runs in trial are of another trial: ' in other.stderr and '--out trial-2' in other.stderr


@pytest.mark.slow
def test_two_processes(project: Path) -> None:
    arguments = [*command('--iters', '2', '--out', 'two'), '--launcher', 'pytorch', '--processes', '2']
    done = run_python(TOOLS / 'try_gates.py', *arguments, cwd=project).stdout
    assert 'in 2 processes' in done and '| plug | 2 |' in done
    assert json.loads((project / 'two/plug/seed0/result.json').read_text())['settings']['processes'] == 2


@pytest.mark.slow
def test_real_data(tmp_path: Path) -> None:
    """A vanilla model of the micrographs, from a checkpoint to the table, where the data and the backbone are."""
    base = ROOT / 'configs/real/bccd/deformable-detr-refine_lite0_1xb4-12e_bccd.py'
    root = (ROOT / Config.fromfile(str(base)).data_root).resolve()
    if not root.is_dir():
        pytest.skip(f'needs the data of configs/real/README.md in {root}')
    shared = f"""
_base_ = {str(VANILLA)!r}
model = dict(backbone=dict(base_channels=8), neck=dict(in_channels=[16, 32, 64]), bbox_head=dict(num_classes=3),
             encoder=dict(num_layers=1), decoder=dict(num_layers=1))
metainfo = dict(classes=('Platelets', 'RBC', 'WBC'))
shared = dict(data_root='{root}/', metainfo=metainfo, data_prefix=dict(img='images/'))
train_dataloader = dict(batch_size=2, dataset=dict(ann_file='annotations/train.json', indices=8, **shared))
val_dataloader = dict(dataset=dict(ann_file='annotations/val.json', indices=2, **shared))
test_dataloader = val_dataloader
val_evaluator = dict(ann_file='{root}/annotations/val.json')
test_evaluator = val_evaluator
train_cfg = dict(max_epochs=1, val_interval=9)
"""
    (tmp_path / 'bccd.py').write_text(shared)
    run_python(ROOT / 'tools/train.py', 'bccd.py', '--work-dir', 'start', cwd=tmp_path)
    trial = ['--checkpoint', 'start/epoch_1.pth', '--gate', PLUG, '--seeds', '2', '--iters', '4', '--out', 'trial']
    run_python(TOOLS / 'try_gates.py', 'bccd.py', *trial, cwd=tmp_path)
    assert '| plug | 2 |' in (tmp_path / 'trial/table.md').read_text()


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
    assert try_gates.names_of(gates) == names


def test_gates_have_the_rate_of_their_class_unless_one_is_given() -> None:
    """PLuG's gates hardly move at the model's rate; the SDPA gate moves far enough at it."""
    gates = [PLUG, 'a=SDPAGatedMultiheadAttention(init="identity", act="silu"); b=PLuGMultiheadAttention']
    rates = dict(PLuGDeformableGate=20.0, SDPAGate=1.0, PLuGGate=20.0)
    assert try_gates.rates_of(gates, None, trained=True) == rates
    assert try_gates.rates_of(gates, None, trained=False) == 1 and try_gates.rates_of(gates, 5.0, trained=True) == 5
    # An attention that only replaces the host's operator has the base class, without parameters.
    assert try_gates.rates_of(['a=MultiScaleDeformableAttention'], None, trained=True) == dict(DeformableGate=1.0)


@pytest.mark.parametrize(
    ('argv', 'said'),
    [
        (['--iters', '0'], 'give 1 or more'),
        (['--iters', '5', '--epochs', '5'], 'not allowed with'),
    ],
)
def test_arguments_are_refused(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        try_gates.main(['config.py', '--gate', PLUG, *argv])
    assert said in capsys.readouterr().err


def test_a_gate_that_is_none_ends_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_shapes(tmp_path / 'data/shapes', num_train=2, num_val=1, size=64)
    (tmp_path / 'vanilla.py').write_text(CONFIG.replace(str(DEMO), str(VANILLA)).replace('EPOCHS', '1'))
    assert cli.main(try_gates.main, ['vanilla.py', '--gate', 'a=Nothing', '--plan-only']) == 2
    assert '--gate a=Nothing' in capsys.readouterr().err
    missing: Any = ['vanilla.py', '--gate', PLUG, '--checkpoint', 'absent.pth']
    assert cli.main(try_gates.main, missing) == 2 and 'absent.pth does not exist' in capsys.readouterr().err
    assert not list(tmp_path.rglob('*.pth'))
    with pytest.raises(ConfigError, match='it needs a path and a type'):
        try_gates.names_of(['PLuG'])
