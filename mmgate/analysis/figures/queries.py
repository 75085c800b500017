"""Queries drawn: what each predicts, and beside it what it depends on in the image."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmgate.analysis.figures import style
from mmgate.analysis.figures.maps import crop_to_image
from mmgate.analysis.probes.relevance import Query

LEAST_COLUMNS = 3  # fewer queries do not fill a page


def draw_queries(
    models: Sequence[tuple[str, Any, Sequence[Query]]], classes: Sequence[Sequence[str]], out: Path
) -> Path:
    """Draw two rows a model, predictions above relevances, a column a query; return the path.

    Args:
        models: Their names, the data sample of one image, and the queries; of a query its mask or box is outlined.
        classes: The names of each model's classes, as far as they are known.
        out: PNG to write.
    """
    image = style.read_image(models[0][1].img_path)
    height_to_width = image.shape[0] / image.shape[1]
    columns = max(LEAST_COLUMNS, *(len(queries) for _, _, queries in models))
    figure, axes = style.panels(2 * len(models), columns, height=(style.WIDTH - 0.6) / columns * height_to_width + 0.3)
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[], frame_on=False)
    for number, ((title, sample, queries), names) in enumerate(zip(models, classes, strict=True)):
        if len(models) > 1:
            axes[2 * number, 0].set_ylabel(title, y=-0.1)  # along both rows
        for column, query in enumerate(queries):
            above, below = axes[2 * number, column], axes[2 * number + 1, column]
            said = f'{style.class_name(query.label, names)} {query.score:.2f}'
            above.set_title(said if query.label >= 0 else f'query {query.number}')
            _prediction(above, image, query, sample)
            below.set_title(f'query {query.number}')
            relevance = crop_to_image(query.relevance, sample)
            share = relevance / max(float(relevance.max()), 1e-12)
            drawn = style.show_map(below, share, image, cmap='magma', alpha=0.7, vmin=0, vmax=1)
    style.colour_bar(figure, drawn, axes, "relevance,\nof the panel's largest", shrink=0.5, fraction=0.03)
    return style.save(figure, out)


def _prediction(axis: Any, image: np.ndarray, query: Query, sample: Any) -> None:
    height, width = image.shape[:2]
    axis.imshow(image, extent=(0, width, height, 0))
    if query.place is not None and query.place.ndim == 2:
        mask = crop_to_image(query.place, sample)
        rows, columns = mask.shape
        x, y = (np.arange(columns) + 0.5) * width / columns, (np.arange(rows) + 0.5) * height / rows
        if mask.min() < 0 < mask.max():
            axis.contour(x, y, mask, levels=[0], colors=['white'], linewidths=2.2)
            axis.contour(x, y, mask, levels=[0], colors=[style.COLOURS[5]], linewidths=1.2)
    elif query.place is not None:
        x, y, across, down = query.place * np.array([width, height] * 2)
        corners = (x - across / 2, y - down / 2, x + across / 2, y + down / 2)
        style.add_box(axis, corners, edgecolor=style.COLOURS[5], linewidth=1.4)
    axis.set(xlim=(0, width), ylim=(height, 0))
