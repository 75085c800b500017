"""Draw on an image the attention that it gets, or each query's prediction and the places that it depends on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np

from mmgate.analysis.figures import style
from mmgate.analysis.probes.relevance import Query, padded_size

LINE_INCHES = 0.15  # height of a line of a title
NOTE = 120  # characters of a line of the note
LEAST_COLUMNS = 3  # fewer queries do not fill a page


def draw_maps(
    sample: Any,
    maps: Sequence[tuple[str, np.ndarray | None]],
    out: Path,
    *,
    columns: int,
    label: str,
    note: str = '',
) -> Path:
    """Draw an image and, beside it, each attention map ``(h, w)`` laid over the image; return the file's path.

    Maps are drawn in multiples of their means. ``note`` is a sentence below the figure.

    All are on one scale, from 0 to twice the mean or more, on which an even map looks even. Where a map has negative
    values, M-DGSA's inhibition, the scale is centred on 0, inhibition is blue, and the mean is that of absolute values.
    None instead of values leaves a panel empty.
    """
    picture = seen_part(style.image_of(sample), sample)
    height, width = picture.shape[:2]
    rows = -(-(len(maps) + 1) // columns)
    titles = [fill(title, style.LINE // columns) for title, _ in maps]
    # Titles of several lines would be taken from the panels' height.
    of_titles = 0.3 + LINE_INCHES * max(title.count('\n') for title in titles)
    figure, axes = style.panels(rows, columns, height=style.WIDTH / columns * height / width * 0.88 + of_titles)
    shown = [
        (axis, title, values / max(float(np.abs(values).mean()), 1e-12))
        for axis, title, (_, values) in zip(axes.flat[1:], titles, maps, strict=False)
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
        axis.set_title(title)
    of_what = f'{label} / mean of its size;\nblue inhibits' if signed else f'{label} / its mean'
    bar = style.colour_bar(figure, drawn, axes, of_what, fraction=0.03)
    # The bar's colours are as transparent as the map's, so it gets a grey ground like the image.
    bar.ax.set_facecolor('0.67')
    if note:
        style.legend(figure, note=fill(note, NOTE))
    return style.save(figure, out)


def seen_part(picture: np.ndarray, sample: Any) -> np.ndarray:
    """Return the part of an image on disk that the model sees: all of it, or the middle if the pipeline crops it."""
    whole = np.array(picture.shape[:2])
    scales = np.array((sample.get('scale_factor') or (1.0, 1.0))[1::-1])
    sides = np.minimum((np.array(sample.img_shape[:2]) / scales).round().astype(int), whole)
    top, left = (whole - sides) // 2
    return picture[top : top + sides[0], left : left + sides[1]]


def crop_to_image(values: np.ndarray, sample: Any) -> np.ndarray:
    """Return a map over the padded input without the rows and columns that lie on the padding."""
    shapes = zip(values.shape, sample.img_shape[:2], padded_size(sample), strict=True)
    rows, columns = (max(round(tokens * own / padded), 1) for tokens, own, padded in shapes)
    return values[:rows, :columns]


def draw_queries(
    models: Sequence[tuple[str, Any, Sequence[Query]]], classes: Sequence[Sequence[str]], out: Path
) -> Path:
    """Draw for each query of a model its prediction and, below it, the relevance of the image to it; return the path.

    Args:
        models: The name of each model, the data sample of the image, and the queries with masks or boxes to outline.
        classes: The names of each model's classes, as far as they are known.
        out: PNG to write.
    """
    image = style.image_of(models[0][1])
    height_to_width = image.shape[0] / image.shape[1]
    columns = max(LEAST_COLUMNS, *(len(queries) for _, _, queries in models))
    figure, axes = style.panels(2 * len(models), columns, height=(style.WIDTH - 0.6) / columns * height_to_width + 0.3)
    signed = any(float(query.relevance.min()) < 0 for _, _, queries in models for query in queries)
    scale = dict(cmap=style.DIVERGING, vmin=-1, vmax=1) if signed else dict(cmap='magma', vmin=0, vmax=1)
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[], frame_on=False)
    for number, ((title, sample, queries), names) in enumerate(zip(models, classes, strict=True)):
        if len(models) > 1:
            axes[2 * number, 0].set_ylabel(title, y=-0.1)  # along both rows
        for column, query in enumerate(queries):
            above = axes[2 * number, column]
            below = axes[2 * number + 1, column]
            words = f'{style.class_name(query.label, names)} {query.score:.2f}'
            above.set_title(words if query.label >= 0 else f'query {query.number}')
            _prediction(above, image, query, sample)
            below.set_title(f'query {query.number}')
            relevance = crop_to_image(query.relevance, sample)
            share = relevance / max(float(np.abs(relevance).max()), 1e-12)
            drawn = style.show_map(below, share, image, alpha=0.7, **scale)
    of_what = f"relevance /\nthe panel's largest{' size; blue inhibits' if signed else ''}"
    style.colour_bar(figure, drawn, axes, of_what, shrink=0.5, fraction=0.03)
    return style.save(figure, out)


def _prediction(axis: Any, image: np.ndarray, query: Query, sample: Any) -> None:
    height, width = image.shape[:2]
    axis.imshow(image, extent=(0, width, height, 0))
    if query.place is not None and query.place.ndim == 2:
        mask = crop_to_image(query.place, sample)
        rows, columns = mask.shape
        x = (np.arange(columns) + 0.5) * width / columns
        y = (np.arange(rows) + 0.5) * height / rows
        if mask.min() < 0 < mask.max():
            axis.contour(x, y, mask, levels=[0], colors=['white'], linewidths=2.2)
            axis.contour(x, y, mask, levels=[0], colors=[style.COLOURS[5]], linewidths=1.2)
    elif query.place is not None:
        x, y, across, down = query.place * np.array([width, height] * 2)
        corners = (x - across / 2, y - down / 2, x + across / 2, y + down / 2)
        style.add_box(axis, corners, edgecolor=style.COLOURS[5], linewidth=1.4)
    axis.set(xlim=(0, width), ylim=(height, 0))
