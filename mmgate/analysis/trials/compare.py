"""Read the logs of runs, compare runs of one seed in pairs, and write tables and figures of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from mmengine.config import Config

from mmgate.analysis.figures.style import COLOURS, layer_axis, legend, panels, save
from mmgate.errors import ConfigError

METRICS = ('coco/bbox_mAP', 'coco/segm_mAP', 'mIoU', 'accuracy/top1')  # compared by default, the first that is there
ALPHA = 0.05
POWER = 0.8
NAN = float('nan')
UNKNOWN = dict.fromkeys(('difference', 'low', 'high', 'p', 'visible'), NAN)
VISIBLE = (
    'Visible is the size that a true difference must have for such seeds to show it in 4 of 5 trials (80 % power, by '
    'the spread that these seeds had). Time and memory are those of a training step, over those of the first row.'
)


@dataclass(frozen=True)
class Run:
    """The log of one run.

    Attributes:
        folder: Work dir of the run.
        curves: Values of its validations by step, by metric.
        seconds: Median seconds of a training step; NaN without any.
        memory: Largest GPU memory in MB that mmengine logged; NaN without any.
        seed: Seed in its config, or None.
        gates: Mean and largest distance of its gates from the value at which they change nothing, in the last record
            of GateStatisticsHook; None without the hook.
    """

    folder: Path
    curves: dict[str, dict[int, float]]
    seconds: float
    memory: float
    seed: int | None
    gates: tuple[float, float] | None

    def final(self, metric: str) -> float:
        """Return the last value of a metric that the run has."""
        return list(self.curves[metric].values())[-1]


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
    seconds = [NAN]
    memory = [NAN]
    gates = None
    for row in (row for log in logs for row in _rows(log)):
        if any(name.endswith('/sparsity') for name in row):  # GateStatisticsHook's, whose names are those of the notes
            means = [value for name, value in row.items() if name.endswith('/moved')]
            most = [value for name, value in row.items() if name.endswith('/moved_most')]
            gates = (float(np.mean(means)), max(most)) if means else gates
            continue
        if 'loss' in row:
            seconds.append(row.get('time', NAN))
            memory.append(row.get('memory', NAN))
            continue
        for name, value in row.items():
            if name not in ('step', 'time', 'data_time') and isinstance(value, (int, float)):
                curves.setdefault(name, {})[int(row.get('step', 0))] = float(value)
    config = logs[-1].with_name('config.py')
    written = Config.fromfile(config, import_custom_modules=False) if config.is_file() else {}
    return Run(
        folder,
        {name: dict(sorted(points.items())) for name, points in curves.items()},
        NAN if np.isnan(seconds).all() else float(np.nanmedian(seconds)),
        NAN if np.isnan(memory).all() else float(np.nanmax(memory)),
        (written.get('randomness') or {}).get('seed'),
        gates,
    )


def _rows(log: Path) -> Iterator[dict[str, Any]]:
    for line in log.read_text().splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:  # the last one of a run that was killed
            continue


def choose_metric(runs: Sequence[Run], metric: str | None = None) -> str:
    """Return ``metric``, or the first of :data:`METRICS` that every run has.

    Raises:
        ConfigError: The runs share none, or a run does not have ``metric``.
    """
    shared = set.intersection(*(set(run.curves) for run in runs))
    found = next((name for name in ([metric] if metric else METRICS) if name in shared), None)
    if found is None:
        wanted = f'the metric {metric}' if metric else f'one of {", ".join(METRICS)}'
        raise ConfigError(f'not every run has {wanted}; they share {", ".join(sorted(shared)) or "none"} (--metric).')
    return found


def paired_difference(values: Sequence[float], baseline: Sequence[float]) -> dict[str, float]:
    """Return the mean difference of ``values`` and ``baseline``, which are pairs of one seed each.

    Returns:
        ``difference``; for two pairs or more also the ends ``low`` and ``high`` of Student's 95 % interval, ``p`` of a
        two-sided paired t-test, and ``visible``, the size that a true difference must have for so many pairs with this
        spread to show it with a power of 80 %, ``(t_0.975 + t_0.8) s`` of the standard error ``s``. Pairs with equal
        differences, as rounded values of few seeds may have, give no spread and no interval. An unknown value is NaN.

    Raises:
        ValueError: The two differ in length.
    """
    if len(values) != len(baseline) or not values:
        raise ValueError(f'{len(values)} and {len(baseline)} values make no pairs; give each group the same seeds.')
    from scipy.stats import sem, t, ttest_1samp

    differences = np.subtract(values, baseline, dtype=np.float64)
    found = dict(UNKNOWN, difference=float(differences.mean()))
    # 0.3 - 0.2 is not 0.2 - 0.1
    if np.ptp(differences) > 1e-9 * np.abs(differences).max():
        test = ttest_1samp(differences, 0)
        low, high = test.confidence_interval(1 - ALPHA)
        quantiles = t.ppf([1 - ALPHA / 2, POWER], len(differences) - 1)
        found.update(low=float(low), high=float(high), p=float(test.pvalue))
        found.update(visible=float(quantiles.sum() * sem(differences)))
    return found


def summary(groups: Mapping[str, Sequence[float]], baselines: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """Return a row for each group of runs: mean, spread, and the paired difference to a baseline group.

    The baseline has as many seeds.

    Args:
        groups: Values of each group, one for each seed, in the same order of seeds.
        baselines: Name of the group that a group is compared with (default: the first one), by the group's name.
    """
    first = next(iter(groups))
    rows = []
    for name, values in groups.items():
        other = (baselines or {}).get(name, first)
        paired = name != other and len(values) == len(groups[other])
        spread = float(np.std(values, ddof=1)) if len(values) > 1 else NAN
        row = dict(name=name, runs=len(values), mean=float(np.mean(values)), std=spread)
        row['against'] = other if paired else '-'
        rows.append({**row, **(paired_difference(values, groups[other]) if paired else UNKNOWN)})
    return rows


def conclusions(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a sentence for each comparison in a summary: a difference, or that none was shown.

    A difference is shown if its p, multiplied as by Holm for the number of comparisons, is below 5 %.
    """
    compared = [row for row in rows if row['against'] != '-']
    known = sorted(row['p'] for row in compared if row['p'] == row['p'])
    times = np.arange(len(known), 0, -1)
    corrected = dict(zip(known, np.maximum.accumulate(known * times), strict=True))
    sentences = []
    for row in compared:
        begin = f'{row["name"]} against {row["against"]}:'
        interval = f'{row["difference"]:.3f}, 95 % interval {row["low"]:.3f} to {row["high"]:.3f}'
        if row['p'] not in corrected:
            few = 'one seed has' if row['runs'] == 1 else 'these seeds have'
            judged = f'{few} no spread by which to judge {row["difference"]:.3f}'
            sentences.append(f'{begin} no difference was shown; {judged}.')
        elif corrected[row['p']] < ALPHA:
            sentences.append(f'{begin} a difference was shown, {interval}.')
        else:
            holm = f' once {len(known)} comparisons are corrected for (Holm)' if row['p'] < ALPHA else ''
            sentences.append(f'{begin} no difference was shown{holm} ({interval}).')
    return sentences


def gates_of(runs: Sequence[Run]) -> dict[str, float]:
    """Return how far runs' gates have moved from the value that changes nothing: mean and largest distance."""
    known = [run.gates for run in runs if run.gates is not None]
    if not known:
        return {}
    means, most = zip(*known, strict=True)
    return dict(moved=float(np.mean(means)), moved_most=max(most))


def as_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a Markdown table with a dash for NaN; columns of costs and of gates' distances appear if rows have any."""
    titles = {key: key for key in ('name', 'runs', 'mean', 'std', 'against', 'difference')}
    titles.update(name='', interval='95 % interval', p='p')
    if any('time' in row for row in rows):
        titles.update(visible='visible', time='time', memory='memory')
    if any('moved' in row for row in rows):
        titles.update(gates='gates moved, mean (most)')
    lines = [f'| {" | ".join(titles.values())} |'.replace('|  |', '| |'), '|---' * len(titles) + '|']
    for row in rows:
        shown = {k: v if not isinstance(v, float) else '-' if np.isnan(v) else f'{v:.3f}' for k, v in row.items()}
        shown['interval'] = '-' if shown['low'] == '-' else f'{shown["low"]} to {shown["high"]}'
        shown['gates'] = f'{row["moved"]:.2g} ({row["moved_most"]:.2g})' if 'moved' in row else '-'
        lines.append(f'| {" | ".join(str(shown.get(key, "-")) for key in titles)} |')
    return '\n'.join(lines)


def unpaired(groups: Mapping[str, Sequence[Run]]) -> Iterator[str]:
    """Yield the reasons why runs of a group cannot be compared in pairs with those of the first group."""
    (first, baseline), *others = groups.items()
    for name, runs in others:
        seeds = [[run.seed for run in listed] for listed in (baseline, runs)]
        if len(runs) != len(baseline):
            yield f'{name} has {len(runs)} runs and {first} {len(baseline)}, so they are not compared in pairs.'
        elif None not in (*seeds[0], *seeds[1]) and seeds[0] != seeds[1]:
            yield f'the seeds of {first} are {seeds[0]}, those of {name} {seeds[1]}: they are no pairs.'


def draw_curves(
    groups: Mapping[str, Sequence[Run]], metric: str, out: Path, *, starts: Mapping[str, float] | None = None
) -> Path:
    """Draw a metric over the steps, with thin lines for runs and a thick one for their mean; return the path.

    Args:
        groups: The runs of each group, by its name.
        metric: Name of the metric.
        out: Path of the picture.
        starts: Values of the checkpoints that runs started from, by name; each is a dashed line.
    """
    figure, ((axis,),) = panels(1, 1, height=3.2, width=5.0)
    for number, (name, runs) in enumerate(groups.items()):
        colour = COLOURS[number % len(COLOURS)]
        curves = [run.curves[metric] for run in runs]
        for curve in curves:
            axis.plot(list(curve), list(curve.values()), '.-', color=colour, linewidth=0.7, markersize=3, alpha=0.5)
        shared = sorted(set.intersection(*map(set, curves)))
        means = [np.mean([curve[step] for curve in curves]) for step in shared]
        axis.plot(shared, means, color=colour, marker='o', markersize=3.5, label=f'{name} (n = {len(runs)})')
    for name, value in (starts or {}).items():
        axis.axhline(value, color='0.4', linestyle='--', linewidth=1, label=name)
    axis.set_ylabel(metric)
    layer_axis(axis, 'step (epoch or iteration) of the validation')
    legend(figure, axis.get_legend_handles_labels()[0], columns=1 if len(groups) < 4 else 2)
    return save(figure, out)


def draw_differences(rows: Sequence[Mapping[str, Any]], groups: Mapping[str, Sequence[float]], out: Path) -> Path:
    """Draw the paired differences of a summary as points, with their mean and its 95 % interval; return the path.

    Args:
        rows: The summary.
        groups: Its values.
        out: Path of the picture.
    """
    compared = [row for row in rows if row['against'] in groups]
    figure, ((axis,),) = panels(1, 1, height=max(1.8, 0.45 * len(compared) + 1.1), width=5.0)
    for place, row in enumerate(compared):
        colour = COLOURS[place % len(COLOURS)]
        differences = np.subtract(groups[row['name']], groups[row['against']])
        # Points of equal differences stay apart.
        heights = place + np.linspace(-0.14, 0.14, len(differences)) * (len(differences) > 1)
        axis.plot(differences, heights, 'o', color=colour, markersize=4, alpha=0.5)
        axis.plot([row['low'], row['high']], [place, place], color=colour, linewidth=1.5)
        axis.plot([row['difference']], [place], '|', color=colour, markersize=16, markeredgewidth=2)
    axis.axvline(0, color='0.6', linewidth=0.8)
    labels = [f'{row["name"]} - {row["against"]} (n = {row["runs"]})' for row in compared]
    axis.set_yticks(range(len(compared)), labels)
    axis.set(xlabel='difference', ylim=(len(compared) - 0.5, -0.5))
    axis.locator_params(axis='x', nbins=5)
    axis.grid(alpha=0.3, axis='x')
    line = ' Line: its 95 % interval.' if any(row['low'] == row['low'] for row in compared) else ''
    legend(figure, note=f'Points: seeds. Bar: their mean.{line}')
    return save(figure, out)
