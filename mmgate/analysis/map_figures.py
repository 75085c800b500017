"""Maps over an image, matrices and curves over layers, drawn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mmcv
import numpy as np

from .figures import COLOURS, LINE, SEQUENTIAL, WIDTH, layer_labels, panels, save, wrap


def draw_maps(image: str, maps: Sequence[tuple[str, np.ndarray]], out: Path, *, columns: int, label: str) -> Path:
    """Draw an image on disk, and maps ``(h, w)`` over it in multiples of their means; return the path.

    All are on one scale, from 0 to twice the mean or more, on which an even map looks even.
    """
    picture = mmcv.imread(image, channel_order='rgb')
    height, width = picture.shape[:2]
    grey = picture.mean(-1)
    rows = -(-(len(maps) + 1) // columns)
    figure, axes = panels(rows, columns, height=WIDTH / columns * height / width * 0.88 + 0.3)
    maps = [(title, values / max(float(values.mean()), 1e-12)) for title, values in maps]
    high = max(2.0, *(float(values.max()) for _, values in maps))
    drawn: Any = None
    for axis in axes.flat:
        axis.set_axis_off()
    axes.flat[0].imshow(picture)
    axes.flat[0].set_title('image')
    for axis, (title, values) in zip(axes.flat[1:], maps, strict=False):
        axis.imshow(grey, cmap='gray', extent=(0, width, height, 0))
        style = dict(cmap='magma', alpha=0.65, vmin=0, vmax=high, interpolation='bilinear')
        drawn = axis.imshow(values, extent=(0, width, height, 0), **style)
        axis.set_title(wrap(title, round(LINE / columns)))
    bar = figure.colorbar(drawn, ax=axes, shrink=0.8, fraction=0.03)
    bar.ax.tick_params(labelsize=7)
    bar.ax.set_facecolor('0.5')  # seen through its colours, as the image is
    bar.set_label(f'{label},\ntimes its mean')
    return save(figure, out)


def crop_to_image(values: np.ndarray, sample: Any) -> np.ndarray:
    """Leave out the rows and columns of a map that lie on a batch's padding."""
    padded, own = sample.get('batch_input_shape') or sample.img_shape[:2], sample.img_shape[:2]
    rows, columns = (max(round(n * a / b), 1) for n, a, b in zip(values.shape, own, padded, strict=True))
    return values[:rows, :columns]


def draw_matrices(models: Sequence[tuple[str, Sequence[str], np.ndarray]], out: Path, *, label: str) -> Path:
    """Draw matrices over layers, 0 to 1, a panel each, side by side; return the path."""
    figure, axes = panels(1, len(models), height=2.9, width=3.6 * len(models) + 0.6)
    for axis, (title, paths, values) in zip(axes[0], models, strict=True):
        drawn = axis.imshow(values, cmap=SEQUENTIAL, vmin=0, vmax=1)
        names = layer_labels(paths)
        axis.set_xticks(range(len(paths)), range(len(paths)), fontsize=6)
        labels = [name if name == str(number) else f'{name}  {number}' for number, name in enumerate(names)]
        axis.set_yticks(range(len(paths)), labels, fontsize=6)
        axis.set(title=wrap(title, round(LINE * 0.55)), xlabel='layer')
    bar = figure.colorbar(drawn, ax=axes, shrink=0.8)
    bar.ax.tick_params(labelsize=7)
    bar.set_label(label, fontsize=8)
    return save(figure, out)


def draw_over_layers(models: Sequence[tuple[str, Sequence[dict[str, Any]]]], out: Path, *, ceiling: str) -> Path:
    """Draw mean and spread of the rows' ``effective_rank`` over the layers; return the path.

    Args:
        models: Their names and rows.
        out: PNG to write.
        ceiling: Key of what a rank can be at most: a dotted line, or, where it lies far above, a word.
    """
    figure, ((axis,),) = panels(1, 1, height=3.2, width=5.0)
    most = sorted({row[ceiling] for _, rows in models for row in rows})
    near = most[0] < 3 * max(row['effective_rank'] + row['std'] for _, rows in models for row in rows)
    for number, (name, rows) in enumerate(models):
        colour, places = COLOURS[number % len(COLOURS)], range(len(rows))
        means, spreads = ([row[key] for row in rows] for key in ('effective_rank', 'std'))
        style = dict(color=colour, marker='os^D'[number % 4], markersize=4, capsize=2, linewidth=1.2)
        axis.errorbar(places, means, yerr=spreads, label=name, **style)
        if near:
            axis.step(places, [row[ceiling] for row in rows], where='mid', color=colour, linewidth=0.8, linestyle=':')
    what = 'dotted: the most, d' if near else f'of at most {", ".join(map(str, most))}'
    axis.set(xlabel='layer', ylabel=f'effective rank of $K^T V$\n({what})', ylim=(0, None))
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.grid(alpha=0.3)
    figure.legend(loc='outside lower center', ncols=1 if len(models) < 4 else 2, fontsize=7, frameon=False)
    return save(figure, out)
