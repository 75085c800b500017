"""A study runs what is missing, goes on where it stopped, and reports pairs of one seed, with conclusions."""

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
from functools import reduce
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, one_of_each, tool
from helpers.small_demo import DEMO
from scipy import stats

from mmgate.analysis.trials.compare import choose_metric, conclusions, paired_difference, read_run
from mmgate.analysis.trials.study import Study, alone, read_study, report_study, run_python, run_study
from mmgate.errors import ConfigError
from mmgate.mm import cli
from mmgate.mm.config_file import read_config

METRIC = 'coco/bbox_mAP'
MOVED = {'gate/a/moved': 0.01, 'heat/b/moved': 0.02, 'gate/a/moved_most': 0.2, 'heat/b/moved_most': 0.4}


def write_log(folder: Path, values: dict[int, float], *, seed: int = 0, day: int = 1, moved: bool = False) -> Path:
    """Write what mmengine leaves of a run that was validated, and killed as it wrote."""
    log = folder / f'2026010{day}_000000/vis_data/scalars.json'
    log.parent.mkdir(parents=True, exist_ok=True)
    rows = [dict(loss=1.0, time=0.5, memory=100, step=1), dict(loss=0.5, time=0.7, memory=120, step=2)]
    rows += [{METRIC: value, 'time': 9.0, 'step': step} for step, value in values.items()]
    rows.append({'heat/b/sparsity': 0.5, **(MOVED if moved else {}), 'step': 3})  # GateStatisticsHook's
    log.write_text('\n'.join(map(json.dumps, rows)) + '\n{"loss": 0.')
    log.with_name('config.py').write_text(f'seeds = 3\nrandomness = dict(seed={seed})\nmodel = dict(type="X")\n')
    return folder


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
        if command[0] == 'train':
            write_log(folder, {1: value}, moved=run.parent.name == 'plug')
            (folder / 'last_checkpoint').write_text('epoch_1.pth')
            if self.fails:
                self.fails -= 1
                raise ConfigError('stopped')
        else:
            (folder / 'logs').mkdir(parents=True, exist_ok=True)
            # In a test of several processes each writes over the file from its start: here the first wrote more.
            (folder / 'logs/x.json').write_text(json.dumps({METRIC: value}) + '5}')


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
    # The time of a part tells nothing of a run.
    timed = ['seconds' in json.loads((tmp_path / name / 'seed0/result.json').read_text()) for name in study.runs]
    assert timed == [False, True]
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
    run_study(replace(two, options=dict(load_from='own.pth')), tmp_path / 'own', execute=(tools := Tools()))
    assert tools.commands[0][:3] == ['test', 'v.py', 'own.pth']


def test_compares_each_with_its_baseline(study: Study, tmp_path: Path) -> None:
    runs = dict(vanilla='v.py', plug='p.py', noisy='n.py', noisy_plug='np.py')
    of_noise = replace(study, runs=runs, baselines=dict(noisy_plug='noisy'), interactions=dict(noisy_plug='plug'))
    run_study(of_noise, tmp_path, execute=Tools(plug=(0, 0.05), noisy=(0.3, 0.3)))
    rows = report_study(of_noise, tmp_path).splitlines()
    low, high = (0.025 + sign * 12.7062 * 0.025 for sign in (-1, 1))  # Student's, one degree of freedom
    assert f'{low:.3f} to {high:.3f}' in rows[5] and '| noisy_plug | 2 | 0.050 | 0.071 | noisy | -0.300 |' in rows[7]
    assert rows[8].startswith('| noisy_plug beside plug | 2 | - | - | difference of differences | -0.325 |')
    assert f'either side by {(high - low) / 2:.3f}. 2 comparisons were' in rows[-1]


def test_refuses_what_cannot_be_a_study(study: Study, tmp_path: Path) -> None:
    (tmp_path / 's.py').write_text("runs = dict()\nseed = [0]\nmetric = 'mIoU'")
    with pytest.raises(ConfigError, match='lacks seeds and has unknown seed'):
        read_study(tmp_path / 's.py')
    with pytest.raises(ConfigError, match='budget tpu is unknown; the study has gpu'):
        run_study(study, tmp_path, execute=Tools(), budget='tpu')
    with pytest.raises(ConfigError, match='has no seed yet that every run'):
        report_study(study, tmp_path, budget='gpu')


def test_settings_that_changed_are_named(study: Study, tmp_path: Path) -> None:
    """And the line that drops the old runs drops them alone; a tuple for a list changes nothing."""
    out = tmp_path / 'my runs'
    run_study(study, out, execute=Tools())
    run_study(replace(study, options={'a.b': 1, 'scale': [2, 2]}), out, execute=Tools())
    of_all = replace(study, options={'a.b': 1, 'scale': (2, 2), 'c': 'x'})
    of_one = replace(study, runs={**study.runs, 'plug': 'p.py'})
    (out / 'plug/seed0/result.json').unlink()  # as of a run that was stopped
    several = replace(study, processes=2)
    for changed, budget, runs, differs in (
        (of_all, None, 4, r"options\.c: not set -> 'x'"),
        (of_one, None, 2, 'gated: .* -> not set'),
        (several, None, 4, 'processes: not set -> 2'),
        (study, 'gpu', 4, r'options\.a\.b: 1 -> \[2\]'),
    ):
        tools = Tools()
        with pytest.raises(ConfigError, match=f'{runs} of 4 runs in .*has now: {differs}\\. To .*runs-2') as error:
            run_study(changed, out, budget=budget, execute=tools)
        folders = shlex.split(str(error.value).partition('rm -r ')[2])
        assert folders == ([str(out)] if runs == 4 else [str(out / 'plug' / name) for name in ('seed0', 'seed1')])
        assert not tools.commands


STUDIES = sorted(path for folder in ('configs', 'projects/*/configs') for path in ROOT.glob(f'{folder}/studies/*.py'))


@pytest.mark.parametrize(
    'path', one_of_each(STUDIES, lambda path: path.stem.rpartition('_')[2]), ids=lambda path: path.stem
)
def test_studies_of_the_repository(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their configs can be read and differ; what options change is there, but for folders, lengths and intervals."""
    monkeypatch.chdir(ROOT)
    study = read_study(path)
    configs = {name: read_config(study.config(name)) for name in study.runs}
    assert len({f'{cfg.model} {cfg.train_dataloader} {cfg.optim_wrapper}' for cfg in configs.values()}) == len(configs)
    for options in (study.options, *({**study.options, **budget} for budget in study.budgets.values())):
        for cfg in configs.values():
            for key in options:
                *parents, last = key.split('.')
                found = reduce(lambda node, part: node[int(part) if part.isdigit() else part], parents, cfg)
                assert last in found or last in ('base_channels', 'indices', 'interval'), key
            cfg.merge_from_dict(options)
            assert cfg.train_dataloader.dataset.data_root == cfg.val_dataloader.dataset.data_root
            last = cfg.train_cfg.get('max_epochs', cfg.train_cfg.get('max_iters'))
            assert cfg.param_scheduler[1].get('end', last) >= last, 'the schedule ends before the training'


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
    (tmp_path / 'study.py').write_text(f"runs = dict(vanilla={str(DEMO)!r})\nseeds = [0]\nmetric = 'mAP'\n")
    told = 'is in use by process .*end it, or give another --out'
    with alone(tmp_path), pytest.raises(ConfigError, match=told):
        tool('study').main([str(tmp_path / 'study.py'), '--out', str(tmp_path)])
    with alone(tmp_path):
        pass


def test_a_process_finds_modules_where_this_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / 'only_here.py').touch()
    monkeypatch.setattr(sys, 'path', [*sys.path, str(tmp_path)])
    run_python(['-c', 'import only_here'])
    with pytest.raises(ConfigError, match='ended with 3; the same command goes on'):
        run_python(['-c', 'raise SystemExit(3)'])


def test_paired_difference_is_the_t_test() -> None:
    a, b = [0.5, 0.7, 0.4, 0.9], [0.4, 0.5, 0.45, 0.7]
    found, expected = paired_difference(a, b), stats.ttest_rel(a, b)
    interval = expected.confidence_interval()
    assert found['p'] == pytest.approx(expected.pvalue)
    assert (found['low'], found['high']) == pytest.approx((interval.low, interval.high))
    assert found['visible'] == pytest.approx((3.18245 + 0.97847) * np.std(np.subtract(a, b), ddof=1) / 2, rel=1e-4)
    for values, baseline in (([0.3, 0.2], [0.2, 0.1]), ([0.3], [0.2])):
        unknown = paired_difference(values, baseline)
        assert unknown.pop('difference') == pytest.approx(0.1) and np.isnan(list(unknown.values())).all()
    with pytest.raises(ValueError, match='2 and 1 values make no pairs'):
        paired_difference([1, 2], [1])


def test_comparisons_are_corrected_for_their_number() -> None:
    """Holm: 0.03 of three comparisons is doubled, and 0.04 is not below it."""
    known = dict(against='vanilla', difference=1.0, low=0.0, high=2.0, runs=3)
    rows = [dict(known, name=name, p=p) for name, p in (('a', 0.001), ('b', 0.04), ('c', 0.03), ('d', float('nan')))]
    first, *held, unknown = conclusions([dict(name='vanilla', against='-'), *rows])
    assert first == 'a against vanilla: a difference was shown, 1.000, 95 % interval 0.000 to 2.000.'
    assert all('no difference was shown once 3 comparisons are corrected for (Holm)' in said for said in held)
    assert unknown.endswith('no difference was shown; these seeds have no spread by which to judge 1.000.')


def test_a_resumed_run_is_one_curve(tmp_path: Path) -> None:
    write_log(tmp_path, {1: 0.1, 2: 0.2}, seed=1)
    write_log(tmp_path, {2: 0.3, 3: 0.4}, seed=2, day=2)
    run = read_run(tmp_path)
    assert run.curves == {'coco/bbox_mAP': {1: 0.1, 2: 0.3, 3: 0.4}} and run.final('coco/bbox_mAP') == 0.4
    assert run.seed == 2 and run.seconds == pytest.approx(0.6) and run.memory == 120
    assert choose_metric([run]) == 'coco/bbox_mAP'
    with pytest.raises(ConfigError, match='the metric mIoU; they share coco/bbox_mAP'):
        choose_metric([run], 'mIoU')
    with pytest.raises(ConfigError, match='is no work dir of a run'):
        read_run(tmp_path / 'nothing')


@pytest.mark.parametrize(
    ('seeds', 'said', 'row'),
    [
        ((0, 1, 0, 1), '', '| b | 2 | 37.500 | 7.778 | a | 2.500 | -3.853 to 8.853 | 0.126 | 0.015 (0.4) |'),
        ((0, 1, 1, 2), 'the seeds of a are [0, 1], those of b [1, 2]', ''),
        ((0, 1, 0), 'lr=0.1 has 1 runs and a 2', '| lr=0.1 | 1 | 32.000 | - | - | - | - | - | 0.015 (0.4) |'),
    ],
    ids=['paired', 'other seeds', 'fewer'],
)
def test_compare_runs_pairs_seeds(
    seeds: tuple[int, ...], said: str, row: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second group alone has the distances of gates, in its logs and so in table and CSV."""
    runs = zip(('0', '1', 'lr=0.1', '3'), seeds, (30.0, 40.0, 32.0, 43.0), (False, False, True, True), strict=False)
    folders = [str(write_log(tmp_path / n, {1: value}, seed=seed, moved=moved)) for n, seed, value, moved in runs]
    groups = [f'a={",".join(folders[:2])}', folders[2] if len(seeds) == 3 else f'b={",".join(folders[2:])}']
    assert cli.main(tool('compare_runs').main, [*groups, '--out', str(tmp_path / 'out')]) == 0
    printed = capsys.readouterr()
    assert said in printed.err if said else 'warning' not in printed.err
    assert row in printed.out
    rows = list(csv.DictReader((tmp_path / 'out/runs.csv').open()))
    assert [row['moved'] for row in rows] == ['', '0.015'] and rows[0]['seconds_per_step'] == '0.6'
    assert cli.main(tool('compare_runs').main, [f'a={folders[0]},{folders[0]}', '--out', 'x']) == 2
    assert 'given twice' in capsys.readouterr().err
