"""Figures of sampling points on their image."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from mmgate.analysis.figures import style
from mmgate.analysis.figures.boxes import PREDICTED, draw_boxes, label_boxes
from mmgate.analysis.probes.recording import Sample
from mmgate.analysis.probes.sampling import SamplingChange, SamplingPoints, density

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

CONTOURS = np.array([0.1, 0.3, 0.5, 0.7, 0.9])  # shares of the highest density
GAINED = style.COLOURS[5]
LOST = style.COLOURS[0]
SEEN = 0.05  # points of a smaller share of the largest weight may lie outside of a close-up


def draw_sampling(
    drawn: Sequence[tuple[str, SamplingPoints, Sample]], out: str | Path, *, classes: Sequence[Sequence[str]] = ()
) -> Path:
    """Draw sampling points, sized by weight and coloured by level, with their density and boxes; return the path.

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


def draw_difference(
    change: SamplingChange,
    samples: tuple[Sample, Sample],
    out: str | Path,
    *,
    titles: tuple[str, str],
    classes: Sequence[Sequence[str]] = ((), ()),
) -> Path:
    """Draw an image, the points of queries before on a close-up, and the weight that each gained or lost; return the path.

    Args:
        change: The points.
        samples: The data samples of the image, before and after (with predictions, if any).
        out: PNG to write.
        titles: The two models.
        classes: The names of their classes, as far as they are known.
    """
    image = style.read_image(samples[0].img_path)
    height, width = image.shape[:2]
    window = _window(change, width, height)
    of_rest = 1.35  # titles, legend
    across = (style.WIDTH - 0.3) / 3
    figure, (axes,) = style.panels(1, 3, height=across * height / width + of_rest)
    whole, weights, changed = axes
    whole.imshow(image, extent=(0, width, height, 0))
    style.add_box(whole, (window[0], window[2], window[1], window[3]), edgecolor='black', linewidth=1.8)
    style.add_box(whole, (window[0], window[2], window[1], window[3]), edgecolor='yellow', linewidth=1.0)
    whole.set(title='image, and the close-up', xlim=(0, width), ylim=(height, 0))
    largest = max(float(np.abs(change.before.weights).max()), 1e-12)
    _draw_points(weights, image, change.before, largest, contours=False)
    weights.set_title(f'weights\n{fill(titles[0], style.LINE // 3)}')
    most = float(np.abs(change.weights).max())
    _draw_changes(changed, image, change, max(most, 1e-12))
    changed.set_title(f'{change.moved:.1%} of the attention moved\n{fill(titles[1], style.LINE // 3)}')
    boxes = [draw_boxes(axis, sample) for axis, sample in ((weights, samples[0]), (changed, samples[1]))]
    for axis in axes:
        axis.set(xticks=[], yticks=[])
    for axis in (weights, changed):
        axis.set(xlim=window[:2], ylim=(window[3], window[2]))
    _legend_of_changes(figure, change, largest, most, boxes)
    figure.draw_without_rendering()
    figure.set_layout_engine('none')
    for axis, (_, found), names in zip((weights, changed), boxes, classes, strict=True):
        label_boxes(axis, found, names)
    return style.save(figure, out)


def _window(change: SamplingChange, width: int, height: int) -> tuple[float, float, float, float]:
    """Return left, right, top and bottom of a close-up of the image's shape, around the points that weigh most."""
    xy = []
    for points in (change.before, change.after):
        weights = np.abs(points.weights)
        xy += [points.xy[weights >= SEEN * weights.max()], points.reference]
    shown = np.concatenate(xy).clip((0, 0), (width, height))
    middle = (shown.min(0) + shown.max(0)) / 2
    sides = (shown.max(0) - shown.min(0)) * 1.2
    # The close-up has the image's shape, is no narrower than a sixteenth of it, and lies inside.
    part = min(max(sides[0] / width, sides[1] / height, 1 / 16), 1)
    half = np.array([width, height]) * part / 2
    middle = middle.clip(half, np.array([width, height]) - half)
    (left, top), (right, bottom) = middle - half, middle + half
    return float(left), float(right), float(top), float(bottom)


def _draw_changes(axis: Axes, image: np.ndarray, change: SamplingChange, largest: float) -> None:
    _draw_image(axis, image)
    # A level with fewer points than another is padded.
    there = change.after.there
    before = change.before.xy[:, :, there].reshape(-1, 2)
    after = change.after.xy[:, :, there].reshape(-1, 2)
    gained = change.weights[:, :, there].ravel()
    for start, end in zip(before, after, strict=True):
        axis.plot(*np.stack([start, end], -1), color='black', linewidth=0.5, alpha=0.5)
    # The largest changes are drawn first, so that they hide no smaller one.
    for place in np.argsort(-np.abs(gained)):
        look: dict[str, Any] = dict(edgecolors='white', linewidths=0.25, alpha=0.85)
        colour = GAINED if gained[place] > 0 else LOST
        x, y = after[place]
        axis.scatter(x, y, s=1 + 60 * abs(gained[place]) / largest, color=colour, **look)
    _draw_references(axis, change.after)


def draw_densities(models: Sequence[tuple[str, np.ndarray]], out: Path, *, images: int) -> Path:
    """Draw each model's :func:`~mmgate.analysis.probes.sampling.mean_density` on one scale; return the path."""
    figure, (axes,) = style.panels(1, len(models), height=3.2, width=3.2 * len(models) + 0.6)
    high = max(float(values.max()) for _, values in models)
    for axis, (title, values) in zip(axes, models, strict=True):
        drawn = style.show_map(axis, values, cmap=style.SEQUENTIAL, vmin=0, vmax=high, extent=(0, 1, 1, 0))
        axis.set(title=fill(title, 34), xlabel="share of the image's width", ylabel='of its height')
    style.colour_bar(figure, drawn, axes, f'density of points on the finest level,\n{images} images; 1: even')
    return style.save(figure, out)


def _draw_image(axis: Axes, image: np.ndarray) -> None:
    """Draw a dim, grey image, on which colours can be seen."""
    height, width = image.shape[:2]
    grey = image.mean(-1, keepdims=True)
    pale = 255 - (255 - (0.6 * grey + 0.4 * image)) * 0.6
    axis.imshow(pale.clip(0, 255).astype(np.uint8), extent=(0, width, height, 0))


def _draw_references(axis: Axes, points: SamplingPoints) -> None:
    look: dict[str, Any] = dict(color='white', edgecolors='black', linewidths=0.9)
    axis.scatter(points.reference[:, 0], points.reference[:, 1], s=60, marker='P', zorder=5, **look)


def _draw_contours(axis: Axes, points: SamplingPoints, size: tuple[int, int]) -> None:
    there = points.there
    of_queries = zip(points.xy, points.weights, strict=True)
    each = [density(xy[:, there], weights[:, there], size) for xy, weights in of_queries]
    found = [values for values in each if values is not None]
    if found:
        # Each query's density is estimated from its points alone.
        heights = np.sum(found, axis=0)
        x = np.linspace(0, size[1], heights.shape[1])
        y = np.linspace(0, size[0], heights.shape[0])
        axis.contour(x, y, heights, levels=heights.max() * CONTOURS, colors='black', linewidths=0.6, alpha=0.55)


def _draw_points(
    axis: Axes, image: np.ndarray, points: SamplingPoints, largest: float, *, contours: bool = True
) -> None:
    height, width = image.shape[:2]
    _draw_image(axis, image)
    if contours:
        _draw_contours(axis, points, (height, width))
    there = points.there
    # Fine levels are drawn last, on top, as their points spread less.
    for place, level in reversed([*enumerate(points.levels)]):
        xy = points.xy[:, :, place, there[place]].reshape(-1, 2)
        weights = points.weights[:, :, place, there[place]].ravel()
        sizes = 2 + 40 * weights.clip(min=0) / largest
        look: dict[str, Any] = dict(
            color=style.COLOURS[level % len(style.COLOURS)], edgecolors='white', linewidths=0.25, alpha=0.85
        )
        axis.scatter(xy[:, 0], xy[:, 1], s=sizes, **look)
    _draw_references(axis, points)


def _legend(
    figure: Figure,
    drawn: Sequence[tuple[str, SamplingPoints, Sample]],
    largest: float,
    boxes: Sequence[tuple[int, Sized]],
) -> None:
    entries = _dots_of_levels({level for _, points, _ in drawn for level in points.levels})
    entries.append(_dot(f'size: weight, largest here {largest:.2f}', 'grey', 42**0.5))
    entries.append(_reference())
    entries.append(_line('density of the weights', color='black', linewidth=0.6))
    entries += _lines_of_boxes(boxes)
    ends = f'{CONTOURS.min():.0%} to {CONTOURS.max():.0%}'
    note = f'Each dot is a point that a query looks at. Lines: {ends} of the highest density of the weights.'
    style.legend(figure, entries, note=note, columns=3)


def _legend_of_changes(
    figure: Figure, change: SamplingChange, largest: float, most: float, boxes: Sequence[tuple[int, Sized]]
) -> None:
    entries = _dots_of_levels(set(change.before.levels))
    entries.append(_dot(f'size: weight, largest here {largest:.2f}', 'grey', 42**0.5))
    entries.append(_dot('right: gained weight', GAINED, 6))
    entries.append(_dot('right: lost weight', LOST, 6))
    entries.append(_dot(f'size: change, largest here {most:.2g}', 'grey', 61**0.5))
    entries.append(_reference())
    entries.append(_line('from the place before', color='black', linewidth=0.5))
    entries += _lines_of_boxes(boxes)
    style.legend(figure, entries, note='Each dot is a point that a query looks at.', columns=4)


def _dot(label: str, colour: str, size: float, marker: str = 'o', edge: str = 'white') -> Line2D:
    return _line(label, linestyle='', marker=marker, color=colour, markeredgecolor=edge, markersize=size)


def _line(label: str, **look: Any) -> Line2D:
    from matplotlib.lines import Line2D

    return Line2D([], [], label=label, **look)


def _dots_of_levels(levels: set[int]) -> list[Line2D]:
    colours = style.COLOURS
    return [_dot(f'on level {n}{"" if n else ", the finest"}', colours[n % len(colours)], 6) for n in sorted(levels)]


def _reference() -> Line2D:
    return _dot("query's reference point", 'white', 7, 'P', 'black')


def _lines_of_boxes(boxes: Sequence[tuple[int, Sized]]) -> list[Line2D]:
    entries = []
    if any(len(found) for _, found in boxes):
        entries.append(_line('predicted box', color=PREDICTED))
    if any(known for known, _ in boxes):
        entries.append(_line('true box', color='black', linestyle='--'))
    return entries
