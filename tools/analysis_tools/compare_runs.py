"""Compare runs: a metric over time, final values with mean, spread and a paired test over seeds, time and memory.

Example: compare_runs.py vanilla=work_dirs/v0,work_dirs/v1 plug=work_dirs/p0,work_dirs/p1 --out out
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from mmengine.config import Config

import mmgate  # noqa: F401
from mmgate.analysis.figures.style import COLOURS, layer_axis, legend, panels, save
from mmgate.analysis.loading import write_csv
from mmgate.errors import ConfigError
from mmgate.mm import cli

METRICS = ('coco/bbox_mAP', 'coco/segm_mAP', 'mIoU', 'accuracy/top1')  # compared by default, the first that is there
CONFIDENCE = 0.95
NAN = float('nan')


@dataclass(frozen=True)
class Run:
    """The log of one run.

    Attributes:
        folder: Work dir of the run.
        curves: ``(steps, values)`` of its validations, by metric.
        seconds: Median seconds of a training step; NaN without any.
        memory: Largest GPU memory in MB that mmengine logged; NaN without any.
        seed: Seed in its config, or None.
        gates: Mean and largest distance of its gates from the value at which they change nothing, in the last record
            of GateStatisticsHook; None without the hook.
    """

    folder: Path
    curves: dict[str, tuple[list[int], list[float]]]
    seconds: float
    memory: float
    seed: int | None = None
    gates: tuple[float, float] | None = None

    def final(self, metric: str) -> float:
        """Return the last value of a metric.

        Raises:
            ConfigError: The run has no validation with it.
        """
        if metric not in self.curves:
            raise ConfigError(f'{self.folder} has no {metric}; it has {", ".join(self.curves) or "no validation"}.')
        return self.curves[metric][1][-1]


def read_run(folder: str | Path) -> Run:
    """Read the logs below a work dir; after a resume, a later log replaces the same steps of an earlier one.

    Raises:
        ConfigError: There is no log.
    """
    folder = Path(folder)
    logs = sorted(folder.glob('*/vis_data/scalars.json'))
    if not logs:
        raise ConfigError(f'{folder} is no work dir of a run: there is no */vis_data/scalars.json in it.')
    curves: dict[str, dict[int, float]] = {}
    seconds = []
    memory = []
    gates: tuple[float, float] | None = None
    for log in logs:
        for line in log.read_text().splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:  # the last one of a run that was killed
                continue
            gates = _moved(row) or gates
            if 'loss' in row:
                seconds.append(row.get('time', np.nan))
                memory.append(row.get('memory', np.nan))
                continue
            for name, value in row.items():
                other = name in ('step', 'time', 'data_time') or name.startswith('gate')  # GateStatisticsHook's
                if not other and isinstance(value, (int, float)):
                    curves.setdefault(name, {})[int(row.get('step', 0))] = float(value)
    listed = {name: (sorted(points), [points[s] for s in sorted(points)]) for name, points in curves.items()}
    middle = NAN if np.isnan(seconds).all() else float(np.nanmedian(seconds))
    largest = NAN if np.isnan(memory).all() else float(np.nanmax(memory))
    return Run(folder, listed, middle, largest, _seed(logs[-1].with_name('config.py')), gates)


def _moved(row: Mapping[str, float]) -> tuple[float, float] | None:
    """Return how far gates are from the value that changes nothing: the mean over layers, and the largest distance."""
    means = [value for name, value in row.items() if name.startswith('gate') and name.endswith('/moved')]
    most = [value for name, value in row.items() if name.startswith('gate') and name.endswith('/moved_most')]
    return (float(np.mean(means)), max(most)) if means and most else None


def _seed(config: Path) -> int | None:
    """Return the seed in the config that mmengine has written into the folder of a log."""
    if not config.is_file():
        return None
    return (Config.fromfile(config, import_custom_modules=False).get('randomness') or {}).get('seed')


def choose_metric(runs: Sequence[Run], metric: str | None = None) -> str:
    """Return ``metric``, or the first of :data:`METRICS` that every run has.

    Raises:
        ConfigError: The runs share none, or a run does not have ``metric``.
    """
    shared = set.intersection(*(set(run.curves) for run in runs))
    if metric is None:
        metric = next((name for name in METRICS if name in shared), None)
    if metric is None or metric not in shared:
        wanted = f'the metric {metric}' if metric else f'one of {", ".join(METRICS)}'
        raise ConfigError(f'not every run has {wanted}; they share {", ".join(sorted(shared)) or "none"} (--metric).')
    return metric


VISIBLE = (
    'Visible is the size that a true difference must have for such seeds to show it in 4 of 5 trials (80 % power, by '
    'the spread that these seeds had). Time and memory are those of a training step, over those of the first row.'
)
POWER = 0.8
UNKNOWN = dict.fromkeys(('difference', 'standard_error', 'low', 'high', 'p'), NAN)


def paired_difference(values: Sequence[float], baseline: Sequence[float]) -> dict[str, float]:
    """Return the mean difference of ``values`` and ``baseline``, which are pairs of one seed each.

    Returns:
        ``difference``; for two pairs or more its ``standard_error``, the ends ``low`` and ``high`` of Student's 95 %
        interval, and ``p`` of a two-sided paired t-test. Pairs with equal differences, as rounded values of few seeds
        may have, give no spread and no interval. An unknown value is NaN.

    Raises:
        ValueError: The two differ in length.
    """
    if len(values) != len(baseline) or not values:
        raise ValueError(f'{len(values)} and {len(baseline)} values make no pairs; give each group the same seeds.')
    from scipy.stats import t

    differences = np.asarray(values, np.float64) - np.asarray(baseline, np.float64)
    mean = float(differences.mean())
    count = len(differences)
    if count == 1:
        return dict(UNKNOWN, difference=mean)
    error = float(differences.std(ddof=1) / count**0.5)
    if error < 1e-9 * np.abs(differences).max() or error == 0:  # 0.3 - 0.2 is not 0.2 - 0.1
        return dict(UNKNOWN, difference=mean, standard_error=0.0)
    reach = error * float(t.ppf((1 + CONFIDENCE) / 2, count - 1))
    p = float(2 * t.sf(abs(mean / error), count - 1))
    return dict(difference=mean, standard_error=error, low=mean - reach, high=mean + reach, p=p)


def summary(
    groups: Mapping[str, Sequence[float]], baselines: Mapping[str, str] | None = None
) -> list[dict[str, float | str | int]]:
    """Return a row for each group of runs: mean, spread, and the paired difference to a baseline group.

    The baseline has as many seeds.

    Args:
        groups: Values of each group, one for each seed, in the same order of seeds.
        baselines: Name of the group that a group is compared with (default: the first one), by the group's name.
    """
    first = next(iter(groups))
    rows: list[dict[str, Any]] = []
    for name, values in groups.items():
        other = (baselines or {}).get(name, first)
        paired = name != other and len(values) == len(groups[other])
        mean = float(np.mean(values))
        spread = float(np.std(values, ddof=1)) if len(values) > 1 else NAN
        row = dict(name=name, runs=len(values), mean=mean, std=spread, against=other if paired else '-')
        rows.append({**row, **(paired_difference(values, groups[other]) if paired else UNKNOWN)})
    return rows


def visible_difference(row: Mapping[str, Any]) -> float:
    """Return how large a true difference must be for so many pairs of runs to show it with a power of 80 %.

    It follows from the spread of the row's differences.

    It is ``(t_0.975 + t_0.8) s``, with the standard error ``s`` and Student's quantiles; NaN if the spread is unknown.
    """
    from scipy.stats import t

    if not row['standard_error'] > 0:
        return NAN
    free = row['runs'] - 1
    return float(row['standard_error'] * (t.ppf((1 + CONFIDENCE) / 2, free) + t.ppf(POWER, free)))


def conclusions(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a sentence for each comparison in a summary: a difference, or that none was shown.

    A difference is shown if its p, multiplied as by Holm for the number of comparisons, is below 5 %.
    """
    compared = [row for row in rows if row['against'] != '-']
    known = sorted((row['p'], place) for place, row in enumerate(compared) if row['p'] == row['p'])
    corrected: dict[int, float] = {}
    for rank, (p, place) in enumerate(known):
        corrected[place] = max([min(1.0, p * (len(known) - rank)), *corrected.values()])
    sentences = []
    for place, row in enumerate(compared):
        begin = f'{row["name"]} against {row["against"]}:'
        if place not in corrected:
            few = 'one seed has' if row['runs'] == 1 else 'these seeds have'
            judged = f'{few} no spread by which to judge {row["difference"]:.3f}'
            sentences.append(f'{begin} no difference was shown; {judged}.')
            continue
        interval = f'{row["difference"]:.3f}, 95 % interval {row["low"]:.3f} to {row["high"]:.3f}'
        if corrected[place] < 1 - CONFIDENCE:
            sentences.append(f'{begin} a difference was shown, {interval}.')
        else:
            alone = row['p'] < 1 - CONFIDENCE
            holm = f' once {len(known)} comparisons are corrected for (Holm)' if alone else ''
            sentences.append(f'{begin} no difference was shown{holm} ({interval}).')
    return sentences


def gates_of(runs: Sequence[Run]) -> dict[str, float]:
    """Return how far runs' gates have moved from the value that changes nothing: mean and largest distance."""
    known = [run.gates for run in runs if run.gates is not None]
    if not known:
        return {}
    means, most = zip(*known, strict=True)
    return dict(moved=float(np.mean(means)), moved_most=max(most))


def as_table(rows: Sequence[dict[str, float | str | int]]) -> str:
    """Return a Markdown table, with a dash for NaN and a column of the gates' distances if a row has any."""
    keys = ['name', 'runs', 'mean', 'std', 'against', 'difference', 'interval', 'p']
    titles = ['', *keys[1:6], '95 % interval', 'p']
    for key in ('visible', 'time', 'memory'):
        if any(key in row for row in rows):
            keys.append(key)
            titles.append(key)
    if any('moved' in row for row in rows):
        keys += ['gates']
        titles += ['gates moved, mean (most)']
    lines = [f'| {" | ".join(titles)} |'.replace('|  |', '| |'), '|---' * len(keys) + '|']
    for row in rows:
        shown = {k: v if not isinstance(v, float) else '-' if np.isnan(v) else f'{v:.3f}' for k, v in row.items()}
        shown['interval'] = '-' if shown['low'] == '-' else f'{shown["low"]} to {shown["high"]}'
        shown['gates'] = f'{row["moved"]:.2g} ({row["moved_most"]:.2g})' if 'moved' in row else '-'
        lines.append(f'| {" | ".join(str(shown[key]) for key in keys)} |')
    return '\n'.join(lines)


def draw_curves_of_runs(
    groups: dict[str, list[Run]], metric: str, out: Path, *, starts: Mapping[str, float] | None = None
) -> Path:
    """Draw a metric over the steps, with thin lines for runs and a thick one for their mean; return the path.

    Args:
        groups: The runs of each group, by its name.
        metric: Name of the metric.
        out: Path of the picture.
        starts: Values of the checkpoints that runs started from, by name; each is a dashed line.
    """
    validations = {tuple(run.curves[metric][0]) for runs in groups.values() for run in runs}
    once = all(len(steps) == 1 for steps in validations)
    height = max(2.0, 0.35 * len(groups) + 1.0) if once else 3.2
    figure, ((axis,),) = panels(1, 1, height=height, width=5.0)
    (_draw_final_values if once else _draw_curves)(axis, groups, metric)
    for name, value in (starts or {}).items():
        draw_line = axis.axvline if once else axis.axhline
        draw_line(value, color='0.4', linestyle='--', linewidth=1, label=name)
    handles = axis.get_legend_handles_labels()[0]
    if handles:
        legend(figure, handles, columns=1 if len(groups) < 4 else 2)
    return save(figure, out)


def draw_differences(
    groups: Mapping[str, Sequence[float]], baselines: Mapping[str, str], metric: str, out: Path
) -> Path | None:
    """Draw the paired differences of every group as points, with their mean and its 95 % interval; return the path.

    Args:
        groups: Values of each group, one for each seed.
        baselines: Name of the group that a group is compared with, by its name; by default the first.
        metric: Name of the metric.
        out: Path of the picture.
    """
    first = next(iter(groups))
    pairs = [(name, baselines.get(name, first)) for name in groups if name != baselines.get(name, first)]
    if not pairs:
        return None
    figure, ((axis,),) = panels(1, 1, height=max(1.8, 0.45 * len(pairs) + 1.1), width=5.0)
    note = 'Points: seeds. Bar: their mean.'
    for place, (name, other) in enumerate(pairs):
        colour = COLOURS[list(groups).index(name) % len(COLOURS)]
        differences = np.asarray(groups[name], np.float64) - np.asarray(groups[other], np.float64)
        # Points of equal differences stay apart.
        heights = place + np.linspace(-0.14, 0.14, len(differences)) if len(differences) > 1 else [place]
        axis.plot(differences, heights, 'o', color=colour, markersize=4, alpha=0.5)
        found = paired_difference(groups[name], groups[other])
        if not np.isnan(found['low']):
            axis.plot([found['low'], found['high']], [place, place], color=colour, linewidth=1.5)
            note = 'Points: seeds. Bar: their mean. Line: its 95 % interval.'
        axis.plot([found['difference']], [place], '|', color=colour, markersize=16, markeredgewidth=2)
    axis.axvline(0, color='0.6', linewidth=0.8)
    labels = [f'{name} - {other} (n = {len(groups[name])})' for name, other in pairs]
    axis.set_yticks(range(len(pairs)), labels)
    axis.set(xlabel=f'difference in {metric}', ylim=(len(pairs) - 0.5, -0.5))
    axis.locator_params(axis='x', nbins=5)
    axis.grid(alpha=0.3, axis='x')
    legend(figure, note=note)
    return save(figure, out)


def _draw_final_values(axis: Any, groups: dict[str, list[Run]], metric: str) -> None:
    """Draw the values of runs with a single validation, which have no curve."""
    for number, runs in enumerate(groups.values()):
        colour = COLOURS[number % len(COLOURS)]
        values = [run.final(metric) for run in runs]
        axis.plot(values, [number] * len(values), 'o', color=colour, markersize=4, alpha=0.5)
        axis.plot([np.mean(values)], [number], '|', color=colour, markersize=14, markeredgewidth=2)
    names = [f'{name} (n = {len(runs)})' for name, runs in groups.items()]
    axis.set_yticks(range(len(names)), names)
    axis.set(xlabel=f'{metric} of every run, and the mean', ylim=(len(names) - 0.5, -0.5))
    axis.locator_params(axis='x', nbins=6)
    axis.grid(alpha=0.3, axis='x')


def _draw_curves(axis: Any, groups: dict[str, list[Run]], metric: str) -> None:
    for number, (name, runs) in enumerate(groups.items()):
        colour = COLOURS[number % len(COLOURS)]
        curves = [run.curves[metric] for run in runs]
        for steps, values in curves:
            axis.plot(steps, values, color=colour, linewidth=0.7, alpha=0.5)
        shared = sorted(set.intersection(*(set(steps) for steps, _ in curves)))
        means = [np.mean([values[steps.index(s)] for steps, values in curves]) for s in shared]
        axis.plot(shared, means, color=colour, marker='o', markersize=3.5, label=f'{name} (n = {len(runs)})')
    axis.set_ylabel(metric)
    layer_axis(axis, 'step (epoch or iteration) of the validation')


def main(argv: list[str]) -> None:
    """Parse arguments, read the logs, draw, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('runs', nargs='+', help='WORK_DIR, or NAME=WORK_DIR,WORK_DIR,... for seeds in one order')
    parser.add_argument('--metric', help='default: box AP, mask AP, mIoU or accuracy, the first that all have')
    parser.add_argument('--out', required=True, help='folder for picture and CSV')
    args = parser.parse_args(argv)
    groups: dict[str, list[Run]] = {}
    for given in args.runs:
        name, _, listed = ('', '', given) if Path(given).is_dir() or '=' not in given else given.partition('=')
        folders = listed.split(',')
        name = name or Path(folders[0]).name
        if name in groups:
            raise ConfigError(f'two groups are called {name}; give them names: NAME=WORK_DIR.')
        if len({Path(folder).resolve() for folder in folders}) < len(folders):
            raise ConfigError(f'{name}: a work dir is given twice; a run counts once.')
        groups[name] = [read_run(folder) for folder in folders]
    metric = choose_metric([run for runs in groups.values() for run in runs], args.metric)
    rows = summary({name: [run.final(metric) for run in runs] for name, runs in groups.items()})
    for row, runs in zip(rows, groups.values(), strict=True):
        row.update(gates_of(runs))
    out = draw_curves_of_runs(groups, metric, Path(args.out) / 'runs.png')
    for row, runs in zip(rows, groups.values(), strict=True):
        row['seconds_per_step'] = float(np.mean([run.seconds for run in runs]))
        row['memory_mb'] = float(np.mean([run.memory for run in runs]))
    # Only runs with gates have the distances of gates.
    columns: dict[str, Any] = dict.fromkeys([key for row in rows for key in row], '')
    write_csv(out.with_suffix('.csv'), [{**columns, **row} for row in rows])
    print(f'{metric}\n{as_table(rows)}')
    for problem in unpaired(groups):
        print(f'warning: {problem}', file=sys.stderr)
    for row in rows:
        memory = '' if np.isnan(row['memory_mb']) else f', {row["memory_mb"]:.0f} MB of GPU'
        print(f'{row["name"]}: {row["seconds_per_step"]:.3f} s a step{memory}')
    print(out, out.with_suffix('.csv'))


def unpaired(groups: dict[str, list[Run]]) -> Iterator[str]:
    """Yield the reasons why runs of a group cannot be compared in pairs with those of the first group."""
    (first, baseline), *others = groups.items()
    for name, runs in others:
        if len(runs) != len(baseline):
            yield f'{name} has {len(runs)} runs and {first} {len(baseline)}, so they are not compared in pairs.'
            continue
        seeds = [[run.seed for run in listed] for listed in (baseline, runs)]
        if None not in (*seeds[0], *seeds[1]) and seeds[0] != seeds[1]:
            yield f'the seeds of {first} are {seeds[0]}, those of {name} {seeds[1]}: they are no pairs.'


if __name__ == '__main__':
    sys.exit(cli.main(main))
