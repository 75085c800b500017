"""A study runs what is missing, goes on where it stopped, holds its folder, and reports pairs of one seed."""

from __future__ import annotations

import csv
import json
import os
import shlex
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, one_of_each, tool
from mmengine.config import Config

from mmgate.analysis.trials.study import Study, alone, read_study, report_study, run_python, run_study
from mmgate.errors import ConfigError
from mmgate.mm.config_file import read_config

METRIC = 'coco/bbox_mAP'
MOVED = dict(moved=0.01, moved_most=0.2)


class Tools:
    """Stands for train.py and test.py: a value follows from the run's seed and what its name adds."""

    def __init__(self, fails: int = 0, **added: tuple[float, float]) -> None:
        self.commands: list[list[str]] = []
        self.fails, self.added = fails, added or dict(plug=(0.05, 0.05))

    def __call__(self, command: list[str]) -> None:
        self.commands.append(command)
        folder = Path(command[command.index('--work-dir') + 1])
        run = folder.parent if command[0] == 'test' else folder
        seed = 0 if run.name == 'start' else int(run.name.removeprefix('seed'))
        value = 0.5 if run.name == 'start' else 0.1 * seed + self.added.get(run.parent.name, (0, 0))[seed]
        logs = folder / '20260101_000000'
        (logs / 'vis_data').mkdir(parents=True, exist_ok=True)
        if command[0] == 'train':
            rows: list[dict[str, Any]] = [{METRIC: value, 'step': 1}]
            if run.parent.name == 'plug':  # GateStatisticsHook's
                rows = [{f'gate/{n}/{k}': n * v for n in (1, 2) for k, v in MOVED.items()}, *rows]
            (logs / 'vis_data/scalars.json').write_text('\n'.join(map(json.dumps, rows)))
            (folder / 'last_checkpoint').write_text('epoch_1.pth')
            if self.fails:
                self.fails -= 1
                raise ConfigError('stopped')
        else:
            # In a test of several processes each writes over the file from its start: here the first wrote more.
            (logs / 'x.json').write_text(json.dumps({METRIC: value}) + '5}')


@pytest.fixture
def study() -> Study:
    runs = dict(vanilla='v.py', plug=dict(config='p.py', gate='a=B', train='gates'))
    return Study(runs, [0, 1], METRIC, {'a.b': 1, 'scale': (2, 2)}, dict(gpu={'a.b': [2]}))


def test_runs_resumes_and_reports(study: Study, tmp_path: Path) -> None:
    tools = Tools(fails=1)
    with pytest.raises(ConfigError, match='stopped'):
        run_study(study, tmp_path, execute=tools)
    assert run_study(study, tmp_path, execute=tools, most=2) == 2
    resumed = tools.commands[1]
    assert resumed[:2] == ['train', 'v.py'] and '--resume' in resumed
    assert resumed[-4:] == ['--cfg-options', 'a.b=1', 'scale=(2, 2)', 'randomness.seed=0']
    assert shlex.join(tools.commands[-1]).count('--gate a=B --train gates') == 1
    assert 'seeds 0 (of 2 planned)' in report_study(study, tmp_path)
    assert run_study(study, tmp_path, execute=tools) == 0
    done = len(tools.commands)
    run_study(study, tmp_path, execute=tools)
    assert len(tools.commands) == done  # nothing is run twice
    table = report_study(study, tmp_path)
    # Two equal differences have no interval.
    assert '| plug | 2 | 0.100 | 0.071 | vanilla | 0.050 | - | - | 0.015 (0.4) |' in table
    assert 'No difference has an interval: that takes two seeds or more' in table
    rows = list(csv.DictReader((tmp_path / 'results.csv').open()))
    assert [(row['name'], row['seed'], row[METRIC]) for row in rows][-1] == ('plug', '1', '0.15')
    assert (tmp_path / 'curves.png').is_file() and (tmp_path / 'table.md').read_text() == table


def test_a_checkpoint_that_runs_go_on_from_has_a_row(study: Study, tmp_path: Path) -> None:
    """It is tested once, before any training; with checkpoints that differ each has one, by the first of its runs."""
    tools, one = Tools(), replace(study, starts=dict.fromkeys(study.runs, 'start.pth'))
    for _ in range(2):
        run_study(one, tmp_path / 'one', execute=tools)
    tested = [command for command in tools.commands if command[2] == 'start.pth']
    assert tools.commands[0] in tested and len(tested) == 1 and tested[0][:3] == ['test', 'v.py', 'start.pth']
    table = report_study(one, tmp_path / 'one').splitlines()
    assert table[4] == '| start | 1 | 0.500 | - | - | - | - | - | - |' and table[5].startswith('| vanilla | 2 |')
    rows = list(csv.DictReader((tmp_path / 'one/results.csv').open()))
    assert (rows[0]['name'], rows[0]['seed'], rows[0][METRIC], rows[0]['moved']) == ('start', '', '0.5', '')
    two = replace(one, starts=dict(vanilla='a.pth', plug='b.pth'))
    run_study(two, tmp_path / 'two', execute=tools)
    assert '| start of plug | 1 |' in report_study(two, tmp_path / 'two')


def test_compares_each_with_its_baseline(study: Study, tmp_path: Path) -> None:
    runs = dict(vanilla='v.py', plug='p.py', noisy='n.py', noisy_plug='np.py')
    of_noise = replace(study, runs=runs, baselines=dict(noisy_plug='noisy'), interactions=dict(noisy_plug='plug'))
    run_study(of_noise, tmp_path, execute=Tools(plug=(0, 0.05), noisy=(0.3, 0.3)))
    rows = report_study(of_noise, tmp_path).splitlines()
    low, high = (0.025 + sign * 12.7062 * 0.025 for sign in (-1, 1))  # Student's, one degree of freedom
    assert f'{low:.3f} to {high:.3f}' in rows[5] and '| noisy_plug | 2 | 0.050 | 0.071 | noisy | -0.300 |' in rows[7]
    assert rows[8].startswith('| noisy_plug beside plug | 2 | - | - | difference of differences | -0.325 |')
    assert f'either side by {(high - low) / 2:.3f}. 2 comparisons were' in rows[-1]


def test_refuses_what_is_no_study_and_results_of_other_settings(study: Study, tmp_path: Path) -> None:
    (tmp_path / 's.py').write_text("runs = dict()\nseed = [0]\nmetric = 'mIoU'")
    with pytest.raises(ConfigError, match='lacks seeds and has unknown seed'):
        read_study(tmp_path / 's.py')
    out, tools = tmp_path / 'my runs', Tools()
    with pytest.raises(ConfigError, match='budget tpu is unknown; the study has gpu'):
        run_study(study, out, execute=tools, budget='tpu')
    with pytest.raises(ConfigError, match='stopped'):
        run_study(study, out, execute=Tools(fails=1), budget='gpu')
    with pytest.raises(ConfigError, match=r'1 of 1 runs in .* are of other settings .*now: options\.a\.b: \[2\] -> 1'):
        run_study(study, out, execute=tools)
    assert not tools.commands
    with pytest.raises(ConfigError, match='has no seed yet that every run'):
        report_study(study, out, budget='gpu')


def test_settings_that_changed_are_named(study: Study, tmp_path: Path) -> None:
    """And the line that drops the old runs drops them alone; a tuple for a list changes nothing."""
    out = tmp_path / 'my runs'
    run_study(study, out, execute=Tools())
    run_study(replace(study, options={'a.b': 1, 'scale': [2, 2]}), out, execute=Tools())
    of_all = replace(study, options={'a.b': 1, 'scale': (2, 2), 'c': 'x'})
    of_one = replace(study, runs={**study.runs, 'plug': 'p.py'})
    for changed, runs, differs in ((of_all, 4, r"options\.c: not set -> 'x'"), (of_one, 2, 'gated: .* -> not set')):
        with pytest.raises(ConfigError, match=f'{runs} of 4 runs in .*has now: {differs}\\. To .*runs-2') as error:
            run_study(changed, out, execute=Tools())
        folders = shlex.split(str(error.value).partition('rm -r ')[2])
        assert folders == ([str(out)] if runs == 4 else [str(out / 'plug' / name) for name in ('seed0', 'seed1')])


FOLDERS = (ROOT / 'configs/studies', *ROOT.glob('projects/*/configs/studies'))
STUDIES = sorted(path for folder in FOLDERS for path in folder.glob('*.py'))
OTHER_DATA = ('digits', 'pvt_shapes_256', 'bccd', 'camvid', 'facemask')


@pytest.mark.parametrize(
    'path',
    one_of_each(STUDIES, lambda path: [name for name in OTHER_DATA if name in path.stem]),
    ids=lambda path: path.stem,
)
def test_studies_of_the_repository(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their configs can be read, and differ."""
    monkeypatch.chdir(ROOT)
    study = read_study(path)
    configs = {name: read_config(study.config(name)) for name in study.runs}
    assert len({f'{cfg.model} {cfg.train_dataloader} {cfg.optim_wrapper}' for cfg in configs.values()}) == len(configs)
    for options in (study.options, *({**study.options, **budget} for budget in study.budgets.values())):
        for cfg in configs.values():
            for key in options:
                check_key(cfg, key)
            cfg.merge_from_dict(options)
            roots = [loader.dataset.data_root for loader in (cfg.train_dataloader, cfg.val_dataloader)]
            hard = not any(name in path.stem for name in OTHER_DATA)
            assert roots[0] == roots[1] and ('shapes_hard' in roots[0]) == hard
            last = cfg.train_cfg.get('max_epochs', cfg.train_cfg.get('max_iters'))
            assert cfg.param_scheduler[1].get('end', last) >= last, 'the schedule ends before the training'


def check_key(cfg: Config, key: str) -> None:
    """An option that is not in the config may only be the folder, the length or the interval of something there."""
    found: Any = cfg
    *parents, last = key.split('.')
    for part in parents:
        found = found[int(part)] if part.isdigit() else found[part]
    assert last in found or last in ('base_channels', 'indices', 'interval'), (
        f'{key}: {last} is in none of {list(found)}'
    )


def test_sigterm_ends_the_child_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python, child = tmp_path / 'python', tmp_path / 'child'
    python.write_text(f'#!/bin/sh\necho $$ > {child}.part\nmv {child}.part {child}\nexec sleep 5\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, 'executable', str(python))

    def stop() -> None:
        while not child.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    # A fault then fails the test, and does not end pytest.
    former = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        threading.Thread(target=stop, daemon=True).start()
        with pytest.raises(SystemExit, match='143'):
            run_python([])
        with pytest.raises(ProcessLookupError):
            os.kill(int(child.read_text()), 0)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, former)


def test_a_study_holds_its_folder(tmp_path: Path) -> None:
    config = ROOT / 'configs/plug/deformable_detr/plug-deformable-detr-refine_r18_1xb8-12e_shapes.py'
    (tmp_path / 'study.py').write_text(f"runs = dict(vanilla={str(config)!r})\nseeds = [0]\nmetric = 'mAP'\n")
    told = rf'is in use by process {os.getpid()} on .*end it, or give another --out'
    with alone(tmp_path), pytest.raises(ConfigError, match=told):
        tool('study').main([str(tmp_path / 'study.py'), '--out', str(tmp_path)])
    with alone(tmp_path):
        pass


def test_a_process_finds_modules_where_this_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / 'only_here.py').touch()
    monkeypatch.setattr(sys, 'path', [*sys.path, str(tmp_path)])
    run_python(['-c', 'import only_here'])
