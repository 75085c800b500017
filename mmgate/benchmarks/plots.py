"""Pictures of benchmarks' rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mmgate.analysis.figures.style import COLOURS

from .ops import Row

METRICS = ('time', 'throughput', 'peak memory')  # what is drawn


def draw_curves(
    rows: Sequence[Row],
    out: str | Path,
    *,
    number: Callable[[str], float],
    xlabel: str,
    logarithmic: bool = False,
) -> Path:
    """Draw time and memory against the inputs' size, one panel for each mode and metric, and return the path.

    Args:
        rows: What a benchmark yielded.
        out: Picture to write; its folder is made.
        number: Takes a row's ``x`` to the abscissa.
        xlabel: What the abscissa is.
        logarithmic: Both axes.
    """
    panels = sorted({(row.mode, row.metric, row.unit) for row in rows if row.metric in METRICS})
    figure, axes = _figure(len(panels))
    for axis, (mode, metric, unit) in zip(axes, panels, strict=True):
        for name in dict.fromkeys(row.provider for row in rows):
            points = [r for r in rows if (r.mode, r.metric, r.provider) == (mode, metric, name)]
            axis.plot([number(r.x) for r in points], [r.y_50 for r in points], marker='o', markersize=3, label=name)
        axis.set(title=f'{mode}: {metric}', xlabel=xlabel, ylabel=unit)
        if logarithmic:
            axis.set(xscale='log', yscale='log')
        else:
            axis.set(ylim=(0, None))
    return _finish(figure, axes, out)


def draw_bars(rows: Sequence[Row], out: str | Path) -> Path:
    """Draw time and memory relative to the first provider, a panel each mode and metric; return the path."""
    panels = sorted({(row.mode, row.metric) for row in rows if row.metric in METRICS})
    names = list(dict.fromkeys(row.provider for row in rows))
    figure, axes = _figure(len(panels))
    for axis, (mode, metric) in zip(axes, panels, strict=True):
        here = [row for row in rows if (row.mode, row.metric) == (mode, metric)]
        inputs = list(dict.fromkeys(row.x for row in here))
        for i, name in enumerate(names):
            shares = {row.x: 1 / row.ratio_to_peer for row in here if row.provider == name and row.ratio_to_peer}
            places = [inputs.index(x) + (i - len(names) / 2 + 0.5) * 0.8 / len(names) for x in shares]
            axis.bar(places, list(shares.values()), 0.8 / len(names), label=name)
        axis.set(title=f'{mode}: {metric}', ylabel=f'share of {names[0]}', xticks=range(len(inputs)))
        axis.set_xticklabels(inputs, fontsize=8)
    return _finish(figure, axes, out)


def _figure(panels: int) -> tuple[Any, list[Any]]:
    import matplotlib

    matplotlib.use('Agg')
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, panels, figsize=(4.2 * panels, 3.6), squeeze=False)
    for axis in axes[0]:
        axis.set_prop_cycle(color=COLOURS)
    return figure, list(axes[0])


def _finish(figure: Any, axes: list[Any], out: str | Path) -> Path:
    from matplotlib import pyplot

    for axis in axes:
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    path = Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path
