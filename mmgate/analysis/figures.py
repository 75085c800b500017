"""How figures look: sizes, colours, panels. Colours are Okabe and Ito's, told apart by the colour-blind, too."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

COLOURS = ('#0072B2', '#E69F00', '#009E73', '#CC79A7', '#56B4E9', '#D55E00', '#F0E442', '#000000')
DIVERGING = 'RdBu_r'  # centred on 0
SEQUENTIAL = 'viridis'
WIDTH = 7.0  # inches: at half a page, text of 9 points stays above 4


def panels(rows: int, columns: int, *, height: float, width: float = WIDTH) -> tuple[Any, Any]:
    """Return a figure that no window knows of, and its axes ``(rows, columns)``.

    Args:
        rows: Rows of panels.
        columns: Columns of panels.
        height: Inches of a row.
        width: Inches of the figure.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height * rows), layout='constrained')
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat:
        axis.tick_params(labelsize=8)
        axis.title.set_fontsize(9)
    return figure, axes


def save(figure: Any, path: Path) -> Path:
    """Write a figure as PNG, folders made, and return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path


def diverging_limits(values: Sequence[float] | Any) -> float:
    """Return the bound of a colour scale centred on 0: the largest absolute value, or a little if all are 0."""
    import numpy as np

    return max(float(np.abs(np.asarray(values)).max()), 1e-6)


def short(path: str, length: int = 34) -> str:
    """Return a module's path with its middle left out where it is long."""
    return path if len(path) <= length else f'{path[: length // 2 - 1]}…{path[-length // 2 :]}'
