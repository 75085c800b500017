"""Run a study, several models each with several seeds; resume what was stopped, and report pairs of one seed."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mmgate.analysis.loading import write_csv
from mmgate.errors import ConfigError, listed
from mmgate.mm.config_file import differences, read_config

from .compare import (
    NAN,
    UNKNOWN,
    VISIBLE,
    as_table,
    conclusions,
    draw_curves,
    draw_differences,
    gates_of,
    paired_difference,
    read_run,
    summary,
)

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

RESULT = 'result.json'
SETTINGS = 'settings.json'
MOST = 4  # changed settings in one message
LINES = 15  # of the output of a command that failed
NEEDED = ('runs', 'seeds', 'metric')
OTHERS = ('options', 'budgets', 'baselines', 'interactions', 'processes')
Execute = Callable[[list[str]], None]
Plan = list[tuple[Path, dict[str, Any]]]  # folder and settings of each run


@dataclass(frozen=True)
class Study:
    """The settings of a study, as its Python file has them.

    Attributes:
        runs: Config of each run by its name, or a dict of ``config``, ``gate`` (one text of ``--gate`` or several) and
            ``train``.
        seeds: Seeds of every run; equal seeds make the pairs of the comparison.
        metric: Name of the metric to compare, as the test logs it.
        options: ``--cfg-options`` of every run.
        budgets: Further options by name of a budget, for example for a larger machine.
        baselines: Name of the run that a run is compared with (default: the first), by the run's name.
        interactions: Name of another run, by a run's name. The difference of the first to its baseline is compared with
            the difference of the other to its baseline.
        processes: Number of processes that train and test together.
        starts: Checkpoint that a run's config starts from (``load_from``), by the run's name.
    """

    runs: dict[str, Any]
    seeds: list[int]
    metric: str
    options: dict[str, Any] = field(default_factory=dict)
    budgets: dict[str, dict[str, Any]] = field(default_factory=dict)
    baselines: dict[str, str] = field(default_factory=dict)
    interactions: dict[str, str] = field(default_factory=dict)
    processes: int = 1
    starts: dict[str, str | None] = field(default_factory=dict)

    def config(self, name: str) -> str:
        """Return the config of a run."""
        run = self.runs[name]
        return run if isinstance(run, str) else run['config']

    def gated(self, name: str) -> list[str]:
        """Return the part of a command line that gates a run's config."""
        run = {} if isinstance(self.runs[name], str) else self.runs[name]
        texts = [run['gate']] if isinstance(run.get('gate'), str) else run.get('gate') or ()
        found = [argument for text in texts for argument in ('--gate', text)]
        return [*found, *(['--train', run['train']] if run.get('train') else [])]


def read_study(path: str | Path) -> Study:
    """Read a study: a Python file with ``runs``, ``seeds``, ``metric``, and optional settings of :class:`Study`.

    Raises:
        ConfigError: Something is missing, unknown or malformed, or a config cannot be read.
    """
    given = read_config(str(path)).to_dict()
    unknown = sorted(set(given) - {*NEEDED, *OTHERS})
    missing = sorted(set(NEEDED) - set(given))
    if unknown or missing:
        raise ConfigError(
            f'study {path} lacks {", ".join(missing) or "nothing"} and has unknown {", ".join(unknown) or "nothing"}; '
            f'it may have {", ".join(sorted((*NEEDED, *OTHERS)))}.'
        )
    if not given['runs'] or not given['seeds'] or len(set(given['seeds'])) != len(given['seeds']):
        raise ConfigError(f'study {path} needs runs and seeds, each seed once.')
    for name, run in given['runs'].items():
        if not isinstance(run, str) and not {'config'} <= set(run) <= {'config', 'gate', 'train'}:
            raise ConfigError(f'run {name} of study {path} has {", ".join(run)}; it takes config, gate and train.')
    for key in ('baselines', 'interactions'):
        pairs = given.get(key, {})
        strangers = sorted({*pairs, *pairs.values()} - set(given['runs']))
        if strangers:
            raise ConfigError(f'{key} of study {path}: {", ".join(strangers)} is none of its runs.')
    study = Study(**given)
    study.starts.update((name, read_config(study.config(name)).get('load_from')) for name in study.runs)
    return study


def run_study(
    study: Study, out: Path, *, budget: str | None = None, most: int | None = None, execute: Execute | None = None
) -> int:
    """Train and test the runs without a result, seed by seed, and return the number of runs that remain.

    A stopped run resumes from its last checkpoint; a run with a result is not repeated. A checkpoint that runs start
    from is tested first, with the config of the first of these runs.

    Args:
        study: The study.
        out: Folder of the runs: ``out/<name>/seed<seed>``.
        budget: One of the study's budgets.
        most: Number of runs after which to stop.
        execute: Function that runs a command, ``train`` or ``test`` and arguments; by default :func:`run_tool`.

    Raises:
        ConfigError: The budget is unknown, or a result or a stopped run has other settings.
    """
    plan = _plan(study, out, budget)
    _refuse_other_settings(plan, out)
    todo = [(folder, settings) for folder, settings in plan if not (folder / RESULT).is_file()]
    for number, (folder, settings) in enumerate(todo[:most]):
        results = [_result(done) for done, _ in plan if (done / RESULT).is_file()]
        known = [result['seconds'] for result in results if 'seconds' in result]
        left = len(todo) - number
        remaining = f', about {timedelta(seconds=round(left * float(np.mean(known))))} for them' if known else ''
        seed = f', seed {settings["seed"]}' if 'seed' in settings else ''
        words = f'run {len(plan) - left + 1} of {len(plan)}: {settings["name"]}{seed}'
        print(f'{words}; {left} to do{remaining}.', flush=True)
        _run(folder, settings, study.metric, execute or partial(run_tool, processes=study.processes))
    return len(todo) - len(todo[:most])


def report_study(
    study: Study, out: Path, *, budget: str | None = None, costs: Mapping[str, Mapping[str, float]] | None = None
) -> str:
    """Write ``results.csv``, ``table.md`` and ``curves.png`` of seeds that are done for every run; return the table.

    The first row is the checkpoint that the runs started from, if there is one. The text below the table gives the
    half-width of the widest interval, below which a difference cannot be told from none.

    Args:
        study: The study.
        out: Folder of the runs.
        budget: One of the study's budgets.
        costs: Time and memory of a run as ratios to those of the first, by the run's name and ``'time'`` and
            ``'memory'``. With them the table also has the smallest difference that these seeds would have shown, and
            a sentence for each comparison; and ``differences.png`` is written.

    Raises:
        ConfigError: No seed is done for every run, or some runs have other settings.
    """
    plan = _plan(study, out, budget)
    _refuse_other_settings(plan, out)
    done = [(folder, settings) for folder, settings in plan if (folder / RESULT).is_file()]
    seeds = [s for s in study.seeds if [x.get('seed') for _, x in done].count(s) == len(study.runs)]
    if not seeds:
        raise ConfigError(f'{out} has no seed yet that every run of the study has done.')
    starts: dict[str, float] = {}
    values: dict[str, dict[int, float]] = {name: {} for name in study.runs}
    runs: dict[str, list[Any]] = {name: [] for name in study.runs}
    results: list[dict[str, Any]] = []
    for folder, settings in done:
        name = settings['name']
        value = _result(folder)['metrics'][study.metric]
        row = dict(name=name, seed=settings.get('seed', ''), **{study.metric: value})
        if 'checkpoint' in settings:
            starts[name] = value
        else:
            run = read_run(folder)
            values[name][settings['seed']] = value
            runs[name] += [run] if settings['seed'] in seeds else []
            row.update(gates_of([run]))
        results.append(row)
    order = [*starts, *study.runs]
    columns = dict.fromkeys([key for row in results for key in row], '')
    results.sort(key=lambda row: order.index(row['name']))
    write_csv(out / 'results.csv', [{**columns, **row} for row in results])

    groups = {name: [of_seed[seed] for seed in seeds] for name, of_seed in values.items()}
    rows = summary(groups, study.baselines)
    first = next(iter(groups))
    for name, other in study.interactions.items():
        pairs = [np.subtract(groups[one], groups[study.baselines.get(one, first)]).tolist() for one in (name, other)]
        row = dict(name=f'{name} beside {other}', runs=len(seeds), mean=NAN, std=NAN)
        rows.append(dict(row, against='difference of differences', **paired_difference(*pairs)))
    for row in rows:
        row.update(gates_of(runs.get(row['name'], [])))
        row.update((costs or {}).get(row['name'], {}))
    tested = [dict(UNKNOWN, name=name, runs=1, mean=value, std=NAN, against='-') for name, value in starts.items()]
    reaches = [(row['high'] - row['low']) / 2 for row in rows if row['p'] == row['p']]
    widest = 'No difference has an interval: that takes two seeds or more, and differences that vary between them.'
    if reaches:
        were = '1 comparison was' if len(reaches) == 1 else f'{len(reaches)} comparisons were'
        widest = f'The widest interval reaches to either side by {max(reaches):.3f}. {were} made, each at 95 %.'
    title = f'{study.metric}, seeds {", ".join(map(str, seeds))} (of {len(study.seeds)} planned)'
    table = f'{title}\n\n{as_table([*tested, *rows])}\n\n{widest}\n'
    if costs is not None:
        table += f'{VISIBLE}\n\n' + ''.join(f'- {sentence}\n' for sentence in conclusions(rows))
        draw_differences(rows, groups, out / 'differences.png')
    (out / 'table.md').write_text(table)
    if all(study.metric in run.curves for of_name in runs.values() for run in of_name):
        draw_curves(runs, study.metric, out / 'curves.png', starts=starts)
    return table


def _plan(study: Study, out: Path, budget: str | None) -> Plan:
    """Return folder and settings of every run: tests of the checkpoints from which runs start, then seed by seed."""
    if budget is not None and budget not in study.budgets:
        raise ConfigError(f'budget {budget} is unknown; the study has {", ".join(study.budgets) or "none"}.')
    options = {**study.options, **(study.budgets[budget] if budget else {})}

    def settings(name: str, **beside: Any) -> dict[str, Any]:
        gated = dict(gated=study.gated(name)) if study.gated(name) else {}
        several = dict(processes=study.processes) if study.processes > 1 else {}
        return dict(name=name, config=study.config(name), options=options) | gated | several | beside

    first: dict[str, str] = {}  # the first run of each checkpoint
    for name in study.runs:
        checkpoint = options.get('load_from', study.starts.get(name))
        if checkpoint:
            first.setdefault(checkpoint, name)
    plan = []
    for checkpoint, name in first.items():
        tested = settings(name, checkpoint=checkpoint)
        plan.append((out / name / 'start', {**tested, 'name': 'start' if len(first) == 1 else f'start of {name}'}))
    # Seed by seed, so that a study cut short still compares.
    return plan + [(out / name / f'seed{s}', settings(name, seed=s)) for s in study.seeds for name in study.runs]


def _refuse_other_settings(plan: Plan, out: Path) -> None:
    """Refuse runs, stopped or done, whose settings differ from the study's.

    Raises:
        ConfigError: Settings differ; the message lists them and says how to keep or drop the runs.
    """
    changed = {}
    begun = [(folder, settings) for folder, settings in plan if (folder / SETTINGS).is_file()]
    for folder, settings in begun:
        kept = json.loads((folder / SETTINGS).read_text())
        found = list(differences(kept, json.loads(json.dumps(settings)), ''))  # JSON has lists for tuples
        if found:
            changed[folder] = found
    if not changed:
        return
    every = list(dict.fromkeys(one for found in changed.values() for one in found))
    dropped = [out] if {path.parent for path in out.glob(f'*/*/{SETTINGS}')} == set(changed) else list(changed)
    raise ConfigError(
        f'{len(changed)} of {len(begun)} runs in {out} are of other settings than the study has now: '
        f'{listed(every, MOST, separator="; ")}. To keep them, give the new ones another folder, --out '
        f'{shlex.quote(f"{out}-2")}, or set the study back. To drop them: '
        f'rm -r {" ".join(shlex.quote(str(folder)) for folder in dropped)}'
    )


def _result(folder: Path) -> dict[str, Any]:
    return json.loads((folder / RESULT).read_text())


def _run(folder: Path, settings: dict[str, Any], metric: str, execute: Execute) -> None:
    """Train and test one run, or test a checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SETTINGS).write_text(json.dumps(settings, indent=1))
    options = [f'{key}={json.dumps(v) if isinstance(v, (list, dict)) else v}' for key, v in settings['options'].items()]
    options += [f'randomness.seed={settings["seed"]}'] if 'seed' in settings else []
    options = [*settings.get('gated', []), *(['--cfg-options', *options] if options else [])]
    begun = time.monotonic()
    resumes = (folder / 'last_checkpoint').is_file()
    if 'checkpoint' not in settings:
        resume = ['--resume'] if resumes else []
        execute(['train', settings['config'], '--work-dir', str(folder), *resume, *options])
    checkpoint = settings.get('checkpoint') or (folder / 'last_checkpoint').read_text().strip()
    execute(['test', settings['config'], checkpoint, '--work-dir', str(folder / 'test'), *options])
    metrics = read_metrics(folder / 'test')
    if metric not in metrics:
        raise ConfigError(f'the test of {folder} gave no {metric}; it gave {", ".join(metrics) or "nothing"}.')
    took = {} if resumes or 'checkpoint' in settings else dict(seconds=round(time.monotonic() - begun, 1))
    (folder / RESULT).write_text(json.dumps(dict(settings=settings, metrics=metrics, **took), indent=1))


def read_metrics(work_dir: Path) -> dict[str, Any]:
    """Return the metrics that ``test.py`` wrote last into a work dir; none if it wrote nothing."""
    logs = sorted(work_dir.glob('*/*.json'), key=lambda path: path.stat().st_mtime)
    if not logs:
        return {}
    # All processes of a test write this one file, each with its own times. Behind a short text the end of a longer one
    # may be left.
    return json.JSONDecoder().raw_decode(logs[-1].read_text())[0]


def run_tool(command: list[str], *, processes: int = 1, quiet: bool = False) -> None:
    """Run a command of ``mmgate.tools``, in several processes if asked for; a quiet one writes into its work dir.

    Raises:
        ConfigError: The command failed.
    """
    launcher = ['torch.distributed.run', '--standalone', f'--nproc_per_node={processes}', '-m']
    several = processes > 1
    call = [*(launcher if several else []), f'mmgate.tools.{command[0]}', *command[1:]]
    log = Path(command[command.index('--work-dir') + 1]) / 'output.log'
    run_python(['-m', *call, *(['--launcher', 'pytorch'] if several else [])], log if quiet else None)


def run_python(arguments: list[str], log: Path | None = None) -> None:
    """Run Python in a process that ends with this one; its output goes to the end of a file if one is given.

    After Ctrl-C, which the process gets as well, this waits until it has ended. SIGTERM, which slurm and Docker send,
    ends the process first.

    Raises:
        ConfigError: It failed; the message has the last lines of the output in the file.
    """
    if log is not None:
        log.parent.mkdir(parents=True, exist_ok=True)
    former = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        with nullcontext() if log is None else log.open('ab') as file:
            call = [sys.executable, '-W', 'ignore', *arguments]
            # It finds projects where this process does.
            environment = os.environ | {'PYTHONPATH': os.pathsep.join(sys.path)}
            errors = None if file is None else subprocess.STDOUT
            child = subprocess.Popen(call, stdout=file, stderr=errors, env=environment)
            try:
                child.wait()
            except KeyboardInterrupt:
                told = '\nStopped; the same command goes on from the last checkpoint of this run.'
                print(told, file=sys.stderr, flush=True)
                child.wait()
                raise
            except SystemExit:
                child.terminate()
                child.wait()
                raise
    finally:
        signal.signal(signal.SIGTERM, former)
    if child.returncode == 130:  # Ctrl-C reached the process alone
        raise KeyboardInterrupt
    if child.returncode:
        last = log.read_text(errors='replace').splitlines()[-LINES:] if log is not None else []
        words = f'{shlex.join(arguments)} ended with {child.returncode}; the same command goes on from there.'
        raise ConfigError('\n'.join([words, *last, *([f'({log})'] if log is not None else [])]))


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold a folder's lock file inside a ``with`` block; the system lets go of it when this process has ended.

    Raises:
        ConfigError: Another process holds it, or it cannot be written.
    """
    lock = folder / 'lock'
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = lock.open('a+')
    except OSError as error:
        raise ConfigError(f'{folder} cannot be written ({error.strerror}); give another --out.') from error
    with file:
        try:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise ConfigError(
                f'{folder} is in use by process {file.read() or "of another user"} ({lock}). Wait for it, end it, or '
                'give another --out.'
            ) from error
        # Some file systems have no locks: there nothing is held.
        except OSError:
            pass
        file.truncate(0)
        file.write(f'{os.getpid()} on {socket.gethostname()}')
        file.flush()
        yield
