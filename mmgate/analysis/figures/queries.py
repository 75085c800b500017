"""Queries drawn: what each predicts, and beside it what it depends on in the image."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mmcv
import numpy as np

from mmgate.analysis.figures.maps import crop_to_image
from mmgate.analysis.figures.style import COLOURS, WIDTH, panels, save
from mmgate.analysis.probes.query_relevance import Query

LEAST_COLUMNS = 3  # fewer queries do not fill a page


def draw_queries(
    models: Sequence[tuple[str, Any, Sequence[Query]]],
    classes: Sequence[Sequence[str]],
    out: Path,
    *,
    width: float = WIDTH,
) -> Path:
    """Draw two rows a model, predictions above relevances, a column a query; return the path.

    The outline is that of the query's mask, or its box.

    Args:
        models: Their names, the data sample of one image, and the queries.
        classes: The names of each model's classes, as far as they are known.
        out: PNG to write.
        width: Inches.
    """
    image = mmcv.imread(models[0][1].img_path, channel_order='rgb')
    height_to_width = image.shape[0] / image.shape[1]
    columns = max(LEAST_COLUMNS, *(len(queries) for _, _, queries in models))
    figure, axes = panels(2 * len(models), columns, height=(width - 0.6) / columns * height_to_width + 0.3, width=width)
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[], frame_on=False)
    for number, ((title, sample, queries), names) in enumerate(zip(models, classes, strict=True)):
        if len(models) > 1:
            axes[2 * number, 0].set_ylabel(title, y=-0.1)  # along both rows
        for column, query in enumerate(queries):
            above, below = axes[2 * number, column], axes[2 * number + 1, column]
            what = names[query.label] if 0 <= query.label < len(names) else f'class {query.label}'
            said = f'{what} {query.score:.2f}' if query.label >= 0 else f'query {query.number}'
            above.set_title(said)
            _prediction(above, image, query, sample)
            below.set_title(f'query {query.number}')
            drawn = _relevance(below, image, crop_to_image(query.relevance, sample))
    bar = figure.colorbar(drawn, ax=axes, shrink=0.5, fraction=0.03)
    bar.ax.tick_params(labelsize=7)
    bar.set_label("relevance,\nof the panel's largest", fontsize=8)
    return save(figure, out)


def _prediction(axis: Any, image: np.ndarray, query: Query, sample: Any) -> None:
    from matplotlib.patches import Rectangle

    height, width = image.shape[:2]
    axis.imshow(image, extent=(0, width, height, 0))
    if query.mask is not None:
        mask = crop_to_image(query.mask, sample)
        rows, columns = mask.shape
        x, y = (np.arange(columns) + 0.5) * width / columns, (np.arange(rows) + 0.5) * height / rows
        if mask.min() < 0 < mask.max():
            axis.contour(x, y, mask, levels=[0], colors=['white'], linewidths=2.2)
            axis.contour(x, y, mask, levels=[0], colors=[COLOURS[5]], linewidths=1.2)
    elif query.box is not None:
        x0, y0, x1, y1 = query.box * np.array([width, height, width, height])
        box = Rectangle((x0, y0), x1 - x0, y1 - y0, fill=False, edgecolor=COLOURS[5], linewidth=1.4)
        axis.add_patch(box)
    axis.set(xlim=(0, width), ylim=(height, 0))


def _relevance(axis: Any, image: np.ndarray, values: np.ndarray) -> Any:
    height, width = image.shape[:2]
    axis.imshow(image.mean(-1), cmap='gray', extent=(0, width, height, 0))
    style = dict(cmap='magma', alpha=0.7, vmin=0, vmax=1, interpolation='bilinear')
    return axis.imshow(values / max(float(values.max()), 1e-12), extent=(0, width, height, 0), **style)
