"""Pictures of benchmarks' rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from mmgate.analysis.figures.style import COLOURS

from .measure import Row


def draw_curves(rows: Sequence[Row], out: str | Path, *, number: Callable[[str], float], xlabel: str) -> Path:
    """Draw time and memory against the inputs' size, one panel for each mode and metric, and return the path.

    ``number`` takes a row's ``x`` to the abscissa, which ``xlabel`` names.
    """
    import matplotlib

    matplotlib.use('Agg')
    from matplotlib import pyplot

    drawn = ('time', 'throughput', 'peak memory')
    panels = sorted({(row.mode, row.metric, row.unit) for row in rows if row.metric in drawn})
    figure, axes = pyplot.subplots(1, len(panels), figsize=(4.2 * len(panels), 3.6), squeeze=False)
    for axis, (mode, metric, unit) in zip(axes[0], panels, strict=True):
        axis.set_prop_cycle(color=COLOURS)
        for name in dict.fromkeys(row.provider for row in rows):
            points = [r for r in rows if (r.mode, r.metric, r.provider) == (mode, metric, name)]
            axis.plot([number(r.x) for r in points], [r.y_50 for r in points], marker='o', markersize=3, label=name)
        axis.set(title=f'{mode}: {metric}', xlabel=xlabel, ylabel=unit, ylim=(0, None))
        axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    path = Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path
