"""Run a study of several configs and seeds, resume stopped runs, write results.csv, table.md and curves.png."""

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from children import alone, ending
from compare_runs import (
    NAN,
    UNKNOWN,
    VISIBLE,
    as_table,
    conclusions,
    draw_curves_of_runs,
    draw_differences,
    gates_of,
    paired_difference,
    read_run,
    summary,
    visible_difference,
)

import mmgate  # noqa: F401
from mmgate.analysis.loading import write_csv
from mmgate.errors import ConfigError, listed
from mmgate.mm import cli
from mmgate.mm.config_file import differences, read_config

RESULT = 'result.json'
SETTINGS = 'settings.json'
MOST = 4  # changed settings in one message
KEYS = {'runs', 'seeds', 'metric', 'options', 'budgets', 'baselines', 'interactions', 'processes'}
OF_RUN = {'config', 'gate', 'gates', 'train'}  # of a run that is more than a config
LOCK = 'lock'
OUTPUT = 'output.log'
LINES = 15  # of the output of a command that failed
Execute = Callable[[list[str]], None]


@dataclass(frozen=True)
class Study:
    """The settings of a study, as its Python file has them.

    Attributes:
        path: The file.
        runs: Config of each run, by its name.
        seeds: Seeds of every run; equal seeds make the pairs of the comparison.
        metric: Name of the metric to compare, as the test logs it.
        options: ``--cfg-options`` of every run.
        budgets: Further options by name of a budget, for example for a larger machine.
        baselines: Name of the run that a run is compared with (default: the first), by the run's name.
        interactions: Name of another run, by a run's name. The difference of the first to its baseline is compared with
            the difference of the other to its baseline.
        starts: Checkpoint that a run's config starts from (``load_from``), by the run's name.
        gated: The part of a command line that gates a run's config, by the run's name.
        processes: Number of processes that train and test together.
    """

    path: Path
    runs: dict[str, str]
    seeds: Sequence[int]
    metric: str
    options: dict[str, Any]
    budgets: dict[str, dict[str, Any]]
    baselines: dict[str, str] = field(default_factory=dict)
    interactions: dict[str, str] = field(default_factory=dict)
    starts: dict[str, str] = field(default_factory=dict)
    gated: dict[str, list[str]] = field(default_factory=dict)
    processes: int = 1


def read_study(path: str | Path) -> Study:
    """Read a study: a Python file with ``runs``, ``seeds``, ``metric``, and optional settings of :class:`Study`.

    Raises:
        ConfigError: Something is missing, unknown or malformed, or a config cannot be read.
    """
    cfg = read_config(str(path))
    unknown = sorted(set(cfg.keys()) - KEYS)
    missing = sorted({'runs', 'seeds', 'metric'} - set(cfg.keys()))
    if unknown or missing:
        raise ConfigError(
            f'study {path} lacks {", ".join(missing) or "nothing"} and has unknown {", ".join(unknown) or "nothing"}; '
            f'it may have {", ".join(sorted(KEYS))}.'
        )
    if not cfg.runs or not cfg.seeds or len(set(cfg.seeds)) != len(cfg.seeds):
        raise ConfigError(f'study {path} needs runs and seeds, each seed once.')
    runs = {name: run if isinstance(run, str) else run.get('config') for name, run in cfg.runs.items()}
    gated = {name: _gate_arguments(path, name, run) for name, run in cfg.runs.items() if not isinstance(run, str)}
    starts = {name: read_config(config).get('load_from') for name, config in runs.items()}
    given = {key: {**cfg.get(key, {})} for key in ('options', 'budgets', 'baselines', 'interactions')}
    for key in ('baselines', 'interactions'):
        strangers = sorted({*given[key], *given[key].values()} - set(cfg.runs))
        if strangers:
            raise ConfigError(f'{key} of study {path}: {", ".join(strangers)} is none of its runs.')
    processes = int(cfg.get('processes', 1))
    beside = dict(starts=starts, gated=gated, processes=processes)
    return Study(Path(path), runs, list(cfg.seeds), cfg.metric, **given, **beside)


def _gate_arguments(path: str | Path, name: str, run: Any) -> list[str]:
    """Return the part of a command line that gates a run.

    Raises:
        ConfigError: The run lacks its config or has unknown keys.
    """
    if 'config' not in run or not set(run) <= OF_RUN:
        raise ConfigError(f'run {name} of study {path} has {", ".join(run)}; it takes config, gate, gates and train.')
    texts = [run['gate']] if isinstance(run.get('gate'), str) else run.get('gate') or ()
    found = [argument for text in texts for argument in ('--gate', text)]
    for key in ('gates', 'train'):
        found += [f'--{key}', run[key]] if run.get(key) else []
    return found


def write_study(study: Study, path: Path) -> None:
    """Write a study as a file that :func:`read_study` reads."""
    runs: dict[str, Any] = {}
    for name, config in study.runs.items():
        arguments = study.gated.get(name, [])
        keys = {key: arguments[place + 1] for place, key in enumerate(arguments) if key in ('--gates', '--train')}
        texts = [arguments[place + 1] for place, key in enumerate(arguments) if key == '--gate']
        of_run = {'config': config, **({'gate': texts} if texts else {}), **{k[2:]: v for k, v in keys.items()}}
        runs[name] = of_run if len(of_run) > 1 else config
    lines = ['runs = {', *(f'    {name!r}: {run!r},' for name, run in runs.items()), '}']
    lines += [f'seeds = {list(study.seeds)!r}', f'metric = {study.metric!r}']
    for key, empty in (('options', {}), ('budgets', {}), ('baselines', {}), ('interactions', {}), ('processes', 1)):
        value = getattr(study, key)
        lines += [f'{key} = {value!r}'] if value != empty else []
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text('\n'.join([f'# Run: python tools/analysis_tools/study.py {path}', *lines, '']))


def run_study(
    study: Study,
    out: Path,
    *,
    budget: str | None = None,
    execute: Execute | None = None,
    most: int | None = None,
    expected: float | None = None,
) -> int:
    """Train and test the runs without a result, seed by seed, and return the number of runs that remain.

    A stopped run resumes from its last checkpoint; a run with a result is not repeated. A checkpoint that runs start
    from is tested first, with the config of the first of these runs.

    Args:
        study: The study.
        out: Folder of the runs: ``out/<name>/seed<seed>``.
        budget: One of the study's budgets.
        execute: Function that runs a command of ``tools``; by default in a process.
        most: Number of runs after which to stop.
        expected: Seconds that a run is expected to take, until one is done.

    Raises:
        ConfigError: The budget is unknown, or a result or a stopped run has other settings.
    """
    execute = execute or partial(run_tool, study.processes)
    planned = list(_planned(study, out, budget))
    starts = list(_starts(study, out, budget))
    _refuse_other_settings([*planned, *starts], out)
    todo = [run for run in planned if not _done(run[0])]
    for folder, settings in starts:
        if not _done(folder):
            print(f'{settings["checkpoint"]}, from which the runs start, is tested first.', flush=True)
            folder.mkdir(parents=True, exist_ok=True)
            _test(folder, settings, settings['checkpoint'], study.metric, execute)
    for number, (folder, settings) in enumerate(todo[:most]):
        seconds = [_seconds(done) for done, _ in planned if _done(done)]
        known = [one for one in seconds if one is not None] or ([] if expected is None else [expected])
        left = len(todo) - number
        remaining = f', about {_clock(left * sum(known) / len(known))} for them' if known else ''
        place = len(planned) - left + 1
        words = f'run {place} of {len(planned)}: {settings["name"]}, seed {settings["seed"]}'
        print(f'{words}; {left} to do{remaining}.', flush=True)
        _train_and_test(folder, settings, study.metric, execute)
    return len(todo[most:]) if most is not None else 0


def _seconds(folder: Path) -> float | None:
    """Return the seconds that a finished run took, or None if it was resumed."""
    return json.loads((folder / RESULT).read_text()).get('seconds')


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f'{minutes // 60}:{minutes % 60:02}:{rest:02}'


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
    values: dict[str, dict[int, float]] = {name: {} for name in study.runs}
    planned = list(_planned(study, out, budget))
    _refuse_other_settings(planned, out)
    for folder, settings in planned:
        if _done(folder):
            result = json.loads((folder / RESULT).read_text())
            values[settings['name']][settings['seed']] = result['metrics'][study.metric]
    seeds = [seed for seed in study.seeds if all(seed in found for found in values.values())]
    if not seeds:
        raise ConfigError(f'{out} has no seed yet that every run of {study.path} has done.')
    groups = {name: [found[seed] for seed in seeds] for name, found in values.items()}
    rows = summary(groups, study.baselines)
    first = next(iter(groups))
    for name, other in study.interactions.items():
        pairs = [(groups[one], groups[study.baselines.get(one, first)]) for one in (name, other)]
        rows.append(interaction(f'{name} beside {other}', *pairs))
    logs = {name: {seed: read_run(out / name / f'seed{seed}') for seed in found} for name, found in values.items()}
    runs = {name: [of_name[seed] for seed in seeds] for name, of_name in logs.items()}
    for row in rows:
        row.update(gates_of(runs.get(str(row['name']), [])))
        if costs is not None:
            row.update(dict(time=NAN, memory=NAN, visible=visible_difference(row)), **costs.get(str(row['name']), {}))
    starts = {
        settings['name']: json.loads((folder / RESULT).read_text())['metrics'][study.metric]
        for folder, settings in _starts(study, out, budget)
        if _done(folder)
    }
    alone: dict[str, Any] = dict(UNKNOWN, runs=1, std=NAN, against='-')
    if costs is not None:
        alone.update(time=NAN, memory=NAN, visible=NAN)
    rows = [*(dict(alone, name=name, mean=value) for name, value in starts.items()), *rows]
    results: list[dict[str, Any]] = [
        dict(name=name, seed='', **{study.metric: value}) for name, value in starts.items()
    ]
    for name, of_name in logs.items():
        for seed, run in of_name.items():
            results.append(dict(name=name, seed=seed, **{study.metric: values[name][seed]}, **gates_of([run])))
    columns = dict.fromkeys([key for row in results for key in row], '')
    write_csv(out / 'results.csv', [{**columns, **row} for row in results])
    reaches = [(float(row['high']) - float(row['low'])) / 2 for row in rows if row['high'] == row['high']]
    widest = 'No difference has an interval: that takes two seeds or more, and differences that vary between them.'
    if reaches:
        widest = f'The widest interval reaches to either side by {max(reaches):.3f}. '
        widest += f'{_comparisons(len(reaches))} made, each at 95 %.'
    table = (
        f'{study.metric}, seeds {", ".join(map(str, seeds))} (of {len(study.seeds)} planned)\n\n{as_table(rows)}\n\n'
        f'{widest}\n'
    )
    if costs is not None:
        table += f'{VISIBLE}\n\n' + ''.join(f'- {sentence}\n' for sentence in conclusions(rows))
        draw_differences(groups, study.baselines, study.metric, out / 'differences.png')
    (out / 'table.md').write_text(table)
    if all(study.metric in run.curves for listed in runs.values() for run in listed):
        draw_curves_of_runs(runs, study.metric, out / 'curves.png', starts=starts)
    return table


def _comparisons(count: int) -> str:
    return '1 comparison was' if count == 1 else f'{count} comparisons were'


def interaction(
    name: str, pair: tuple[Sequence[float], Sequence[float]], other: tuple[Sequence[float], Sequence[float]]
) -> dict[str, Any]:
    """Return a row of :func:`summary` for the difference in ``pair`` minus that in ``other``.

    Args:
        name: Name of the row.
        pair: A group and its baseline, a value for each seed.
        other: Another group and its baseline, with the same seeds.
    """
    differences = [[value - base for value, base in zip(*both, strict=True)] for both in (pair, other)]
    row: dict[str, Any] = dict(name=name, runs=len(differences[0]), mean=float('nan'), std=float('nan'))
    return dict(row, against='difference of differences', **paired_difference(*differences))


def _planned(study: Study, out: Path, budget: str | None) -> Iterator[tuple[Path, dict[str, Any]]]:
    if budget is not None and budget not in study.budgets:
        raise ConfigError(f'budget {budget} is unknown; {study.path} has {", ".join(study.budgets) or "none"}.')
    options = {**study.options, **(study.budgets[budget] if budget else {})}
    for seed in study.seeds:  # seed by seed, so that a study cut short still compares
        for name, config in study.runs.items():
            settings = dict(name=name, config=config, seed=seed, options=options)
            yield out / name / f'seed{seed}', {**settings, **_beside(study, name)}


def _beside(study: Study, name: str) -> dict[str, Any]:
    """Return the settings of a run that only some studies have, so that the files of the others stay as they are."""
    settings: dict[str, Any] = dict(gated=study.gated[name]) if study.gated.get(name) else {}
    return {**settings, **(dict(processes=study.processes) if study.processes > 1 else {})}


def _refuse_other_settings(planned: Sequence[tuple[Path, dict[str, Any]]], out: Path) -> None:
    """Refuse runs, stopped or done, whose settings differ from the study's.

    Raises:
        ConfigError: Settings differ; the message lists them and says how to keep or drop the runs.
    """
    begun = [(folder, _kept(folder), settings) for folder, settings in planned if _kept(folder) is not None]
    changed = {folder: list(differences(kept, _as_json(now), '')) for folder, kept, now in begun}
    other = [folder for folder, found in changed.items() if found]
    if not other:
        return
    every = list(dict.fromkeys(one for found in changed.values() for one in found))
    there = {path.parent for name in (RESULT, SETTINGS) for path in out.glob(f'*/*/{name}')}
    dropped = [out] if there == set(other) else other
    beside = shlex.quote(f'{out}-2')
    named = listed(every, MOST, separator='; ')
    raise ConfigError(
        f'{len(other)} of {len(begun)} runs in {out} are of other settings than the study has now: {named}. To keep '
        f'them, give the new ones another folder, --out {beside}, or set the study back. To drop them: '
        f'rm -r {" ".join(shlex.quote(str(folder)) for folder in dropped)}'
    )


def _kept(folder: Path) -> dict[str, Any] | None:
    """Return the settings of the run in a folder, or None if there is no run."""
    for name in (RESULT, SETTINGS):
        if (folder / name).is_file():
            kept = json.loads((folder / name).read_text())
            return kept.get('settings', kept)
    return None


def _as_json(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings as they are read back from JSON, with lists for tuples."""
    return json.loads(json.dumps(settings))


def _starts(study: Study, out: Path, budget: str | None) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield folder and settings of a test of each checkpoint from which runs start."""
    options = {**study.options, **(study.budgets[budget] if budget else {})}
    first: dict[str, str] = {}  # the first run of each checkpoint
    for name in study.runs:
        checkpoint = options.get('load_from', study.starts.get(name))
        if checkpoint:
            first.setdefault(checkpoint, name)
    for checkpoint, run in first.items():
        name = 'start' if len(first) == 1 else f'start of {run}'
        settings = dict(name=name, config=study.runs[run], checkpoint=checkpoint, options=options)
        yield out / run / 'start', {**settings, **_beside(study, run)}


def _done(folder: Path) -> bool:
    return (folder / RESULT).is_file()


def _options(settings: dict[str, Any]) -> list[str]:
    """Return the part of a command line that sets a run's options."""
    options = [f'{key}={json.dumps(v) if isinstance(v, (list, dict)) else v}' for key, v in settings['options'].items()]
    if 'seed' in settings:
        options.append(f'randomness.seed={settings["seed"]}')
    return ['--cfg-options', *options] if options else []


def _train_and_test(folder: Path, settings: dict[str, Any], metric: str, execute: Execute) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SETTINGS).write_text(json.dumps(settings, indent=1))
    resume = ['--resume'] if (folder / 'last_checkpoint').is_file() else []
    begun = time.monotonic()
    gated = settings.get('gated', [])
    execute(['train', settings['config'], *gated, '--work-dir', str(folder), *resume, *_options(settings)])
    _test(folder, settings, (folder / 'last_checkpoint').read_text().strip(), metric, execute)
    if not resume:
        result = json.loads((folder / RESULT).read_text())
        (folder / RESULT).write_text(json.dumps(dict(result, seconds=round(time.monotonic() - begun, 1)), indent=1))


def _test(folder: Path, settings: dict[str, Any], checkpoint: str, metric: str, execute: Execute) -> None:
    gated = settings.get('gated', [])
    work_dir = str(folder / 'test')
    execute(['test', settings['config'], checkpoint, *gated, '--work-dir', work_dir, *_options(settings)])
    logs = sorted((folder / 'test').glob('*/*.json'), key=lambda path: path.stat().st_mtime)
    metrics = json.loads(logs[-1].read_text().splitlines()[-1]) if logs else {}
    if metric not in metrics:
        raise ConfigError(f'the test of {folder} gave no {metric}; it gave {", ".join(metrics) or "nothing"}.')
    (folder / RESULT).write_text(json.dumps(dict(settings=settings, metrics=metrics), indent=1))


def run_tool(processes: int, command: list[str], *, quiet: bool = False) -> None:
    """Run a command of ``mmgate.tools``, in several processes if asked for; a quiet one writes into its work dir.

    After Ctrl-C, which the command gets as well, this waits until it has ended. SIGTERM ends the command first.

    Raises:
        ConfigError: The command failed.
    """
    launcher = ['torch.distributed.run', '--standalone', f'--nproc_per_node={processes}', '-m']
    module = f'mmgate.tools.{command[0]}'
    call = [sys.executable, '-W', 'ignore', '-m', *(launcher if processes > 1 else []), module, *command[1:]]
    call += ['--launcher', 'pytorch'] if processes > 1 else []
    log = Path(command[command.index('--work-dir') + 1]) / OUTPUT
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open('ab') if quiet else nullcontext() as file, ending():
        child = subprocess.Popen(call, stdout=file, stderr=None if file is None else subprocess.STDOUT)
        try:
            while child.poll() is None:
                _show_step(log.parent if quiet else None)
                with suppress(subprocess.TimeoutExpired):
                    child.wait(1.0)
        except KeyboardInterrupt:
            told = '\nStopped; the same command goes on from the last checkpoint of this run.'
            print(told, file=sys.stderr, flush=True)
            child.wait()
            raise
        except SystemExit:
            child.terminate()
            child.wait()
            raise
    if quiet and sys.stdout.isatty():
        print('\r\033[K', end='', flush=True)
    if child.returncode == 130:  # Ctrl-C reached the command alone
        raise KeyboardInterrupt
    if child.returncode:
        last = ''
        if quiet:
            last = '\n'.join(['', *log.read_text(errors='replace').splitlines()[-LINES:], f'({log})'])
        words = f'{shlex.join(call[4:])} ended with {child.returncode}'
        raise ConfigError(f'{words}; the study goes on from there when it is run again.{last}')


def _show_step(folder: Path | None) -> None:
    """Show the last step that a run in ``folder`` has logged, on a terminal."""
    logs = sorted(folder.glob('*/vis_data/scalars.json')) if folder is not None and sys.stdout.isatty() else []
    rows = logs[-1].read_text().splitlines()[-1:] if logs else []
    with suppress(ValueError, KeyError, TypeError):
        print(f'\r\033[K  step {json.loads(rows[0])["step"]}' if rows else '', end='', flush=True)


def add_processes(parser: argparse.ArgumentParser) -> None:
    """Add ``--launcher`` and ``--processes``."""
    parser.add_argument('--launcher', choices=['none', 'pytorch'], default='none', help='pytorch: several processes')
    parser.add_argument('--processes', type=int, help='of --launcher pytorch, on a GPU each (default 2)')


def main(argv: list[str]) -> None:
    """Parse arguments, run missing runs, write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('study', help='a file of configs/studies')
    parser.add_argument('--out', help='folder of the runs (default: work_dirs/<name of the study>[-<budget>])')
    parser.add_argument('--budget', help="one of the study's budgets, such as gpu")
    parser.add_argument('--max-runs', type=int, help='stop after this many runs; the next call goes on')
    parser.add_argument('--report-only', action='store_true', help='run nothing')
    add_processes(parser)
    args = parser.parse_args(argv)
    study = read_study(args.study)
    if args.launcher == 'pytorch':
        study = replace(study, processes=args.processes or max(2, study.processes))
    out = Path(args.out or f'work_dirs/{Path(args.study).stem}{f"-{args.budget}" if args.budget else ""}')
    left = 0
    if not args.report_only:
        with alone(out / LOCK):
            left = run_study(study, out, budget=args.budget, most=args.max_runs)
    try:
        print(report_study(study, out, budget=args.budget))
    except ConfigError as error:
        if not left:
            raise
        print(f'no table yet: {error}')
    if left:
        print(f'{left} runs are left; the same command goes on.')


if __name__ == '__main__':
    sys.exit(cli.main(main))
