"""Studies: configs times seeds, trained and tested by the tools, resumed where they were stopped."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmgate.engine.cli import read_config
from mmgate.engine.preflight import ConfigError

from .runs import as_table, draw_curves_of_runs, read_run, summary
from .subjects import write_csv

RESULT = 'result.json'
KEYS = {'runs', 'seeds', 'metric', 'options', 'budgets'}
Execute = Callable[[list[str]], None]


@dataclass(frozen=True)
class Study:
    """What a study's file says.

    Attributes:
        path: The file.
        runs: By name, a config; the first is what the others are compared with.
        seeds: Of every run; equal seeds make the pairs of the comparison.
        metric: What is compared, as the test writes it.
        options: ``--cfg-options`` of every run.
        budgets: By name, further options: the same study on a larger machine.
    """

    path: Path
    runs: dict[str, str]
    seeds: Sequence[int]
    metric: str
    options: dict[str, Any]
    budgets: dict[str, dict[str, Any]]


def read_study(path: str | Path) -> Study:
    """Read a study: a Python file with ``runs``, ``seeds``, ``metric``, and if wanted ``options`` and ``budgets``.

    Raises:
        ConfigError: Something is missing, unknown or malformed, or a config cannot be read.
    """
    cfg = read_config(str(path))
    unknown, missing = sorted(set(cfg.keys()) - KEYS), sorted({'runs', 'seeds', 'metric'} - set(cfg.keys()))
    if unknown or missing:
        raise ConfigError(
            f'study {path} lacks {", ".join(missing) or "nothing"} and has unknown {", ".join(unknown) or "nothing"}; '
            f'it may have {", ".join(sorted(KEYS))}.'
        )
    if not cfg.runs or not cfg.seeds or len(set(cfg.seeds)) != len(cfg.seeds):
        raise ConfigError(f'study {path} needs runs and seeds, each seed once.')
    for config in cfg.runs.values():
        read_config(config)
    options, budgets = ({**cfg.get(key, {})} for key in ('options', 'budgets'))
    return Study(Path(path), dict(cfg.runs), list(cfg.seeds), cfg.metric, options, budgets)


def run_study(
    study: Study, out: Path, *, budget: str | None = None, execute: Execute | None = None, most: int | None = None
) -> int:
    """Train and test what has no result yet, seed by seed, and return how many runs are still to be done.

    A run that was stopped goes on from its last checkpoint; one that has its result is not run again.

    Args:
        study: The study.
        out: Folder of the runs: ``out/<name>/seed<seed>``.
        budget: One of the study's budgets.
        execute: Runs a command of ``tools``; a process by default.
        most: Stop after this many runs.

    Raises:
        ConfigError: The budget is unknown, or a result is of other settings.
    """
    execute = execute or _execute
    planned = list(_planned(study, out, budget))
    todo = [run for run in planned if not _done(*run)]
    for folder, settings in todo[:most]:
        _train_and_test(folder, settings, study.metric, execute)
    return len(todo[most:]) if most is not None else 0


def report_study(study: Study, out: Path, *, budget: str | None = None) -> str:
    """Write ``results.csv``, ``table.md`` and ``curves.png`` of the seeds that every run has done; return the table.

    Below the table stands the least difference that the study could have told from 0: twice the largest standard error.

    Raises:
        ConfigError: No seed is done by every run.
    """
    values: dict[str, dict[int, float]] = {name: {} for name in study.runs}
    for folder, settings in _planned(study, out, budget):
        if _done(folder, settings):
            result = json.loads((folder / RESULT).read_text())
            values[settings['name']][settings['seed']] = result['metrics'][study.metric]
    seeds = [seed for seed in study.seeds if all(seed in found for found in values.values())]
    if not seeds:
        raise ConfigError(f'{out} has no seed yet that every run of {study.path} has done.')
    groups = {name: [found[seed] for seed in seeds] for name, found in values.items()}
    rows = summary(groups)
    write_csv(out / 'results.csv', [dict(name=n, seed=s, **{study.metric: v[s]}) for n, v in values.items() for s in v])
    errors = [float(row['standard_error']) for row in rows[1:] if row['standard_error'] == row['standard_error']]
    sees = f'{2 * max(errors):.3f}' if errors else 'unknown: it takes two seeds or more'
    table = (
        f'{study.metric}, seeds {", ".join(map(str, seeds))} (of {len(study.seeds)} planned)\n\n{as_table(rows)}\n\n'
        f'Least difference that this could have shown (two standard errors): {sees}.\n'
    )
    (out / 'table.md').write_text(table)
    runs = {name: [read_run(out / name / f'seed{seed}') for seed in seeds] for name in groups}
    if all(study.metric in run.curves for listed in runs.values() for run in listed):
        draw_curves_of_runs(runs, study.metric, out / 'curves.png')
    return table


def _planned(study: Study, out: Path, budget: str | None) -> Iterator[tuple[Path, dict[str, Any]]]:
    if budget is not None and budget not in study.budgets:
        raise ConfigError(f'budget {budget} is unknown; {study.path} has {", ".join(study.budgets) or "none"}.')
    options = {**study.options, **(study.budgets[budget] if budget else {})}
    for seed in study.seeds:  # seed by seed, so that a study cut short still compares
        for name, config in study.runs.items():
            yield out / name / f'seed{seed}', dict(name=name, config=config, seed=seed, options=options)


def _done(folder: Path, settings: dict[str, Any]) -> bool:
    result = folder / RESULT
    if not result.is_file():
        return False
    if json.loads(result.read_text())['settings'] != json.loads(json.dumps(settings)):
        raise ConfigError(f'{result} is of other settings than the study has now; choose another --out or remove it.')
    return True


def _train_and_test(folder: Path, settings: dict[str, Any], metric: str, execute: Execute) -> None:
    options = [f'{key}={json.dumps(v) if isinstance(v, (list, dict)) else v}' for key, v in settings['options'].items()]
    options.append(f'randomness.seed={settings["seed"]}')
    resume = ['--resume'] if (folder / 'last_checkpoint').is_file() else []
    common = ['--cfg-options', *options]
    execute(['train', settings['config'], '--work-dir', str(folder), *resume, *common])
    checkpoint = (folder / 'last_checkpoint').read_text().strip()
    execute(['test', settings['config'], checkpoint, '--work-dir', str(folder / 'test'), *common])
    logs = sorted((folder / 'test').glob('*/*.json'), key=lambda path: path.stat().st_mtime)
    metrics = json.loads(logs[-1].read_text().splitlines()[-1]) if logs else {}
    if metric not in metrics:
        raise ConfigError(f'the test of {folder} gave no {metric}; it gave {", ".join(metrics) or "nothing"}.')
    (folder / RESULT).write_text(json.dumps(dict(settings=settings, metrics=metrics), indent=1))


def _execute(command: list[str]) -> None:
    call = [sys.executable, '-W', 'ignore', '-m', f'mmgate.tools.{command[0]}', *command[1:]]
    code = subprocess.run(call, check=False).returncode
    if code:
        raise ConfigError(f'{" ".join(call[4:])} ended with {code}; the study goes on from there when it is run again.')
