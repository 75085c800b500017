"""A study runs what is missing, goes on where it stopped, and reports pairs of one seed."""

from __future__ import annotations

import csv
import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, one_of_each, tool
from mmengine.config import Config

from mmgate.errors import ConfigError
from mmgate.mm.config_file import read_config

studies = tool('study')
METRIC = 'coco/bbox_mAP'
MOVED = dict(moved=0.01, moved_most=0.2)


class Tools:
    """Stands for tools/train.py and tools/test.py: a value follows from the run's seed and what its name adds."""

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
        if command[0] == 'train':
            (logs / 'vis_data').mkdir(parents=True, exist_ok=True)
            rows: list[dict[str, Any]] = [{METRIC: value, 'step': 1}]
            if run.parent.name == 'plug':  # GateStatisticsHook's
                rows = [{f'gate/{n}/{k}': n * v for n in (1, 2) for k, v in MOVED.items()}, *rows]
            (logs / 'vis_data/scalars.json').write_text('\n'.join(map(json.dumps, rows)))
            (folder / 'last_checkpoint').write_text('epoch_1.pth')
            if self.fails:
                self.fails -= 1
                raise ConfigError('stopped')
        else:
            logs.mkdir(parents=True)
            (logs / 'x.json').write_text(json.dumps({METRIC: value}))


@pytest.fixture
def study() -> Any:
    runs, options = dict(vanilla='v.py', plug='p.py'), {'a.b': 1, 'scale': (2, 2)}
    return studies.Study(Path('s.py'), runs, [0, 1], METRIC, options, dict(gpu={'a.b': [2]}))


def test_runs_resumes_and_reports(study: Any, tmp_path: Path) -> None:
    tools = Tools(fails=1)
    with pytest.raises(ConfigError, match='stopped'):
        studies.run_study(study, tmp_path, execute=tools)
    assert studies.run_study(study, tmp_path, execute=tools, most=2) == 2
    resumed = tools.commands[1]
    assert resumed[:2] == ['train', 'v.py'] and '--resume' in resumed
    assert resumed[-4:] == ['--cfg-options', 'a.b=1', 'scale=(2, 2)', 'randomness.seed=0']
    assert 'seeds 0 (of 2 planned)' in studies.report_study(study, tmp_path)
    assert studies.run_study(study, tmp_path, execute=tools) == 0
    done = len(tools.commands)
    studies.run_study(study, tmp_path, execute=tools)
    assert len(tools.commands) == done  # nothing is run twice
    table = studies.report_study(study, tmp_path)
    assert (
        '| plug | 2 | 0.100 | 0.071 | vanilla | 0.050 | - | - | 0.015 (0.4) |' in table
    )  # two equal differences have no interval
    assert 'No difference has an interval: that takes two seeds or more' in table and '0 comparisons' not in table
    rows = list(csv.DictReader((tmp_path / 'results.csv').open()))
    assert [(row['name'], row['seed'], row[METRIC]) for row in rows][-1] == ('plug', '1', '0.15')
    assert (tmp_path / 'curves.png').is_file() and (tmp_path / 'table.md').read_text() == table


def test_a_checkpoint_that_runs_go_on_from_has_a_row(study: Any, tmp_path: Path) -> None:
    """It is tested once, before any training; with checkpoints that differ each has one, by the first of its runs."""
    tools, one = Tools(), replace(study, starts=dict.fromkeys(study.runs, 'start.pth'))
    studies.run_study(one, tmp_path / 'one', execute=tools)
    tested = [command for command in tools.commands if command[2] == 'start.pth']
    assert tools.commands[0] in tested and len(tested) == 1 and tested[0][:3] == ['test', 'v.py', 'start.pth']
    table = studies.report_study(one, tmp_path / 'one').splitlines()
    assert table[4] == '| start | 1 | 0.500 | - | - | - | - | - | - |' and table[5].startswith('| vanilla | 2 |')
    rows = list(csv.DictReader((tmp_path / 'one/results.csv').open()))
    assert (rows[0]['name'], rows[0]['seed'], rows[0][METRIC], rows[0]['moved']) == ('start', '', '0.5', '')
    assert float(rows[-1]['moved']) == pytest.approx(0.015) and float(rows[-1]['moved_most']) == 0.4
    studies.run_study(one, tmp_path / 'one', execute=tools)
    assert len([command for command in tools.commands if command[2] == 'start.pth']) == 1
    two = replace(one, starts=dict(vanilla='a.pth', plug='b.pth'))
    studies.run_study(two, tmp_path / 'two', execute=tools)
    assert '| start of plug | 1 |' in studies.report_study(two, tmp_path / 'two')
    other = replace(two, options=dict(load_from='of_all.pth'))
    studies.run_study(other, tmp_path / 'three', execute=tools)
    assert [c[2] for c in tools.commands if c[2].endswith('all.pth')] == ['of_all.pth']


def test_compares_each_with_its_baseline(study: Any, tmp_path: Path) -> None:
    runs = dict(vanilla='v.py', plug='p.py', noisy='n.py', noisy_plug='np.py')
    of_noise = replace(study, runs=runs, baselines=dict(noisy_plug='noisy'))
    studies.run_study(of_noise, tmp_path, execute=Tools(plug=(0, 0.05), noisy=(0.3, 0.3)))
    rows = studies.report_study(of_noise, tmp_path).splitlines()
    assert '| noisy_plug | 2 | 0.050 | 0.071 | noisy | -0.300 |' in rows[-3]
    low, high = (0.025 + sign * 12.7062 * 0.025 for sign in (-1, 1))  # Student's, one degree of freedom
    assert f'{low:.3f} to {high:.3f}' in rows[-5] and f'either side by {(high - low) / 2:.3f}. 1 comp' in rows[-1]


def test_refuses_what_is_no_study_and_results_of_other_settings(study: Any, tmp_path: Path) -> None:
    (tmp_path / 's.py').write_text("runs = dict()\nseed = [0]\nmetric = 'mIoU'")
    with pytest.raises(ConfigError, match='lacks seeds and has unknown seed'):
        studies.read_study(tmp_path / 's.py')
    with pytest.raises(ConfigError, match='stopped'):
        studies.run_study(study, tmp_path, execute=Tools(fails=1), budget='gpu')
    tools = Tools()
    with pytest.raises(ConfigError, match=r'1 of 1 runs in .* are of other settings than the study has now'):
        studies.run_study(study, tmp_path, execute=tools)
    assert not tools.commands
    with pytest.raises(ConfigError, match='budget tpu is unknown; s.py has gpu'):
        studies.run_study(study, tmp_path, execute=tools, budget='tpu')
    with pytest.raises(ConfigError, match='has no seed yet that every run'):
        studies.report_study(study, tmp_path, budget='gpu')
    studies.run_study(study, tmp_path, execute=tools, most=1, budget='gpu')
    with pytest.raises(ConfigError, match='are of other settings'):
        studies.report_study(study, tmp_path)


CHANGED = {
    'an option': (dict(options={'a.b': 2, 'scale': (2, 2)}), 4, r'options\.a\.b: 1 -> 2'),
    'one more': (dict(options={'a.b': 1, 'scale': (2, 2), 'c': 'x'}), 4, r"options\.c: not set -> 'x'"),
    'a config': (dict(runs=dict(vanilla='v.py', plug='p2.py')), 2, "config: 'p.py' -> 'p2.py'"),
    'a tuple for a list': (dict(options={'a.b': 1, 'scale': [2, 2]}), 0, ''),
}


@pytest.mark.parametrize(('change', 'runs', 'differs'), list(CHANGED.values()), ids=list(CHANGED))
def test_settings_that_changed_are_named(study: Any, tmp_path: Path, change: dict, runs: int, differs: str) -> None:
    """And the line that drops the old runs drops them alone."""
    out = tmp_path / 'my runs'
    studies.run_study(study, out, execute=Tools())
    changed = replace(study, **change)
    if not runs:
        studies.run_study(changed, out, execute=Tools())
        return
    with pytest.raises(
        ConfigError, match=f'{runs} of 4 runs in .*has now: {differs}\\. To keep .*--out .*runs-2'
    ) as error:
        studies.run_study(changed, out, execute=Tools())
    folders = shlex.split(str(error.value).partition('rm -r ')[2])
    assert folders == [str(out)] if runs == 4 else [str(out / 'plug' / name) for name in ('seed0', 'seed1')]


# Those of compare_adapters.py are read by its test.
FOLDERS = (ROOT / 'configs/studies', *ROOT.glob('projects/*/configs/studies'))
STUDIES = sorted(x for folder in FOLDERS for x in folder.glob('*.py') if not x.stem.startswith('adapt_'))

OTHER_DATA = ('digits', 'pvt_shapes_256', 'bccd', 'camvid', 'facemask')


@pytest.mark.parametrize(
    'path',
    one_of_each(STUDIES, lambda path: [name for name in OTHER_DATA if name in path.stem]),
    ids=lambda path: path.stem,
)
def test_studies_of_the_repository(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their configs can be read, and differ."""
    monkeypatch.chdir(ROOT)
    study = studies.read_study(path)
    configs = {name: read_config(config) for name, config in study.runs.items()}
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
