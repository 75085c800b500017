"""Draw on an image the attention that it gets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np

from mmgate.analysis.figures import style
from mmgate.analysis.probes.recording import padded_size

LINE_INCHES = 0.15  # height of a line of a title
NOTE = 120  # characters of a line of the note


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
