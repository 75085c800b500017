"""Maps over an image, matrices and curves over layers, drawn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmgate.analysis.figures import style
from mmgate.analysis.probes.relevance import padded_size


def draw_maps(
    sample: Any, maps: Sequence[tuple[str, np.ndarray | None]], out: Path, *, columns: int, label: str
) -> Path:
    """Draw an image, and maps ``(h, w)`` over it in multiples of their means; return the path.

    All are on one scale, from 0 to twice the mean or more, on which an even map looks even. Where a map has negative
    values, M-DGSA's inhibition, the scale is centred on 0 and inhibition is blue; the mean is that of sizes.

    Args:
        sample: The image's data sample.
        maps: Their titles and values; None leaves a panel empty.
        out: PNG to write.
        columns: Of panels, the image's among them.
        label: What the values are.
    """
    picture = seen_part(style.read_image(sample.img_path), sample)
    height, width = picture.shape[:2]
    rows = -(-(len(maps) + 1) // columns)
    figure, axes = style.panels(rows, columns, height=style.WIDTH / columns * height / width * 0.88 + 0.3)
    shown = [
        (axis, title, values / max(float(np.abs(values).mean()), 1e-12))
        for axis, (title, values) in zip(axes.flat[1:], maps, strict=False)
        if values is not None
    ]
    high = max(2.0, *(float(np.abs(values).max()) for *_, values in shown))
    signed = any(float(values.min()) < 0 for *_, values in shown)
    scale = dict(cmap=style.DIVERGING, vmin=-high, vmax=high) if signed else dict(cmap='magma', vmin=0, vmax=high)
    for axis in axes.flat:
        axis.set_axis_off()
    axes.flat[0].imshow(picture)
    axes.flat[0].set_title('image')
    for axis, title, values in shown:
        drawn = style.show_map(axis, values, picture, alpha=0.65, **scale)
        axis.set_title(style.wrap(title, round(style.LINE / columns)))
    of_what = f'{label},\ntimes its mean{" size; blue inhibits" if signed else ""}'
    bar = style.colour_bar(figure, drawn, axes, of_what, fraction=0.03)
    bar.ax.set_facecolor('0.5')  # seen through its colours, as the image is
    return style.save(figure, out)


def seen_part(picture: np.ndarray, sample: Any) -> np.ndarray:
    """Return what a model sees of an image on disk: all of it, or its middle, to which classifiers' pipelines crop."""
    whole = np.array(picture.shape[:2])
    scales = np.array((sample.get('scale_factor') or (1.0, 1.0))[1::-1])
    sides = np.minimum((np.array(sample.img_shape[:2]) / scales).round().astype(int), whole)
    top, left = (whole - sides) // 2
    return picture[top : top + sides[0], left : left + sides[1]]


def crop_to_image(values: np.ndarray, sample: Any) -> np.ndarray:
    """Leave out the rows and columns of a map that lie on a batch's padding."""
    shapes = zip(values.shape, sample.img_shape[:2], padded_size(sample), strict=True)
    rows, columns = (max(round(tokens * own / padded), 1) for tokens, own, padded in shapes)
    return values[:rows, :columns]


def draw_matrices(models: Sequence[tuple[str, Sequence[str], np.ndarray]], out: Path, *, label: str) -> Path:
    """Draw matrices over layers, 0 to 1, a panel each, side by side; return the path."""
    figure, axes = style.panels(1, len(models), height=2.9, width=3.6 * len(models) + 0.6)
    for axis, (title, paths, values) in zip(axes[0], models, strict=True):
        drawn = style.show_map(axis, values, cmap=style.SEQUENTIAL, vmin=0, vmax=1)
        numbers = range(len(paths))
        labels = [name if name == f'{n}' else f'{name}  {n}' for n, name in enumerate(style.layer_labels(paths))]
        axis.set_xticks(numbers, numbers, fontsize=6)
        axis.set_yticks(numbers, labels, fontsize=6)
        axis.set(title=style.wrap(title, round(style.LINE * 0.55)), xlabel='layer')
    style.colour_bar(figure, drawn, axes, label)
    return style.save(figure, out)


def draw_ranks(models: Sequence[tuple[str, Sequence[dict[str, Any]]]], out: Path) -> Path:
    """Draw mean and spread of the ranks over the layers, a panel a kind; return the path.

    The most that a rank can be is a dotted line, or, where it lies far above, a word.
    """
    figure, (axes,) = style.panels(1, 2, height=3.0)
    most = sorted({row['channels'] for _, rows in models for row in rows})
    for axis, kind in zip(axes, ('matrix_rank', 'effective_rank'), strict=True):
        near = most[0] < 3 * max(row[kind] + row[f'{kind}_std'] for _, rows in models for row in rows)
        for number, (name, rows) in enumerate(models):
            colour, places = style.COLOURS[number % len(style.COLOURS)], range(len(rows))
            means, spreads = ([row[key] for row in rows] for key in (kind, f'{kind}_std'))
            look = dict(color=colour, marker='os^D'[number % 4], markersize=4, capsize=2, linewidth=1.2)
            axis.errorbar(places, means, yerr=spreads, label=name, **look)
            if near:
                ceiling = [row['channels'] for row in rows]
                axis.step(places, ceiling, where='mid', color=colour, linewidth=0.8, linestyle=':')
        what = 'dotted: the most, d' if near else f'of at most {", ".join(map(str, most))}'
        axis.set(ylabel=f'{kind.replace("_", " ")} of $K^T V$\n({what})', ylim=(0, None))
        style.layer_axis(axis)
    style.legend(figure, axes[0].get_legend_handles_labels()[0], columns=1 if len(models) < 4 else 2)
    return style.save(figure, out)
