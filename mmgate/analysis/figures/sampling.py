"""Draw the sampling points of deformable attention on their image."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from mmgate.analysis.figures import style
from mmgate.analysis.figures.boxes import PREDICTED, draw_boxes, label_boxes
from mmgate.analysis.probes.recording import Sample
from mmgate.analysis.probes.sampling import SamplingPoints, density

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

CONTOURS = np.array([0.1, 0.3, 0.5, 0.7, 0.9])  # shares of the highest density


def draw_sampling(
    drawn: Sequence[tuple[str, SamplingPoints, Sample]], out: str | Path, *, classes: Sequence[Sequence[str]] = ()
) -> Path:
    """Draw an image with its sampling points, sized by weight and coloured by level, their density and boxes.

    Args:
        drawn: For each panel its title, its points and the data sample of its image (with predictions, if any).
        out: PNG to write.
        classes: The names of each panel's classes, as far as they are known.
    """
    image = style.read_image(drawn[0][2].img_path)
    height, width = image.shape[:2]
    across = style.WIDTH if len(drawn) > 1 else 4.6
    of_rest = 1.15  # titles, legend
    figure, (axes,) = style.panels(1, len(drawn), height=across / len(drawn) * height / width + of_rest, width=across)
    # All panels share one scale of sizes, so that they can be compared.
    largest = max(max(float(points.weights.max()) for _, points, _ in drawn), 1e-12)
    panel_boxes = []
    for axis, (title, points, sample) in zip(axes, drawn, strict=True):
        _draw_points(axis, image, points, largest)
        panel_boxes.append(draw_boxes(axis, sample))
        where = 'encoder' if points.is_encoder else 'decoder'
        axis.set_title(f'{title}\n{where}: {style.short(points.path)}'.strip())
        axis.set(xlim=(0, width), ylim=(height, 0), xticks=[], yticks=[])
    _legend(figure, drawn, largest, panel_boxes)
    # The layout decides which labels would hide one another. It is made now and kept.
    figure.draw_without_rendering()
    figure.set_layout_engine('none')
    for axis, (_, found), names in zip(axes, panel_boxes, classes or [()] * len(drawn), strict=True):
        label_boxes(axis, found, names)
    return style.save(figure, out)


def draw_densities(models: Sequence[tuple[str, np.ndarray]], out: Path, *, images: int) -> Path:
    """Draw where each model's points lie on average over images, all on one colour scale; return the file's path.

    See :func:`~mmgate.analysis.probes.sampling.mean_density`.
    """
    figure, (axes,) = style.panels(1, len(models), height=3.2, width=3.2 * len(models) + 0.6)
    high = max(float(values.max()) for _, values in models)
    for axis, (title, values) in zip(axes, models, strict=True):
        drawn = style.show_map(axis, values, cmap=style.SEQUENTIAL, vmin=0, vmax=high, extent=(0, 1, 1, 0))
        axis.set(title=fill(title, 34), xlabel="share of the image's width", ylabel='of its height')
    style.colour_bar(figure, drawn, axes, f'density of points on the finest level,\n{images} images; 1: even')
    return style.save(figure, out)


def _draw_points(axis: Axes, image: np.ndarray, points: SamplingPoints, largest: float) -> None:
    height, width = image.shape[:2]
    # A dim, grey image lets the colours of the levels be seen.
    grey = image.mean(-1, keepdims=True)
    pale = 255 - (255 - (0.6 * grey + 0.4 * image)) * 0.6
    axis.imshow(pale.clip(0, 255).astype(np.uint8), extent=(0, width, height, 0))
    each = [density(xy, weights, (height, width)) for xy, weights in zip(points.xy, points.weights, strict=True)]
    found = [values for values in each if values is not None]
    if found:
        # Each query's density is estimated from its points alone.
        heights = np.sum(found, axis=0)
        x = np.linspace(0, width, heights.shape[1])
        y = np.linspace(0, height, heights.shape[0])
        axis.contour(x, y, heights, levels=heights.max() * CONTOURS, colors='black', linewidths=0.6, alpha=0.55)
    # Fine levels are drawn last, on top, as their points spread less.
    for place, level in reversed([*enumerate(points.levels)]):
        xy = points.xy[:, :, place].reshape(-1, 2)
        weights = points.weights[:, :, place].ravel()
        sizes = 2 + 40 * weights.clip(min=0) / largest
        look: dict[str, Any] = dict(
            color=style.COLOURS[level % len(style.COLOURS)], edgecolors='white', linewidths=0.25, alpha=0.85
        )
        axis.scatter(xy[:, 0], xy[:, 1], s=sizes, **look)
    axis.scatter(
        points.reference[:, 0],
        points.reference[:, 1],
        s=60,
        marker='P',
        color='white',
        edgecolors='black',
        linewidths=0.9,
        zorder=5,
    )


def _legend(
    figure: Figure,
    drawn: Sequence[tuple[str, SamplingPoints, Sample]],
    largest: float,
    boxes: Sequence[tuple[int, Sized]],
) -> None:
    from matplotlib.lines import Line2D

    def dot(label: str, colour: str, size: float, marker: str = 'o', edge: str = 'white') -> Line2D:
        look: dict[str, Any] = dict(marker=marker, color=colour, markeredgecolor=edge, markersize=size)
        return Line2D([], [], linestyle='', label=label, **look)

    levels = sorted({level for _, points, _ in drawn for level in points.levels})
    colours = style.COLOURS
    entries = [dot(f'on level {n}{"" if n else ", the finest"}', colours[n % len(colours)], 6) for n in levels]
    entries.append(dot(f'size: weight, largest here {largest:.2f}', 'grey', 42**0.5))
    entries.append(dot("query's reference point", 'white', 7, 'P', 'black'))
    entries.append(Line2D([], [], color='black', linewidth=0.6, label='density of the weights'))
    if any(len(found) for _, found in boxes):
        entries.append(Line2D([], [], color=PREDICTED, label='predicted box'))
    if any(known for known, _ in boxes):
        entries.append(Line2D([], [], color='black', linestyle='--', label='true box'))
    ends = f'{CONTOURS.min():.0%} to {CONTOURS.max():.0%}'
    note = f'Each dot is a point that a query looks at. Lines: {ends} of the highest density of the weights.'
    style.legend(figure, entries, note=note, columns=3)
