"""Draw the sampling points of deformable attention on their image."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from mmgate.analysis.figures import style
from mmgate.analysis.figures.boxes import MOST_BOXES, PREDICTED, THRESHOLD, draw_boxes, label_boxes
from mmgate.analysis.probes.recording import Sample
from mmgate.analysis.probes.sampling import SamplingChange, SamplingPoints, density

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

CONTOURS = np.array([0.1, 0.3, 0.5, 0.7, 0.9])  # shares of the highest density
# Of a difference: no colour of it has another meaning in the same figure.
GAINED = style.COLOURS[5]
LOST = style.COLOURS[0]
BOX = style.COLOURS[2]
WEIGHT = '0.2'
MOST_NUMBERS = 8  # queries that are named
OWN = 2.2  # width of the outline of a query's own box
LARGEST = 70  # points squared of the largest dot
LEAST = 1e-3  # share of the largest weight that the largest change has at least, so that rounding is drawn small
SEEN = 0.05  # points of a smaller share of the largest weight may lie outside of a close-up


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
        _draw_own_boxes(axis, points, PREDICTED, width=OWN, rim=OWN + 1.2)
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
    change: SamplingChange, image_path: str, out: str | Path, *, titles: tuple[str, str], model: str = ''
) -> Path:
    """Draw sampling points of queries on a close-up, without gates, and the weight that gates gave or took from each.

    Args:
        change: The points.
        image_path: The image.
        out: PNG to write.
        titles: Titles of the two close-ups.
        model: Name of the model that has the points after, for the note.

    Returns:
        The path of the PNG.
    """
    image = style.read_image(image_path)
    height, width = image.shape[:2]
    window = _window(change, width, height)
    of_rest = 1.2  # titles, legend
    across = (style.WIDTH - 0.3) / 3
    figure, (axes,) = style.panels(1, 3, height=across * height / width + of_rest)
    whole, weights, changed = axes
    whole.imshow(image, extent=(0, width, height, 0))
    corners = (window[0], window[2], window[1], window[3])
    style.add_box(whole, corners, edgecolor='black', linewidth=2.4)
    style.add_box(whole, corners, edgecolor='white', linewidth=1.2)
    whole.set(title='the image, and the close-up', xlim=(0, width), ylim=(height, 0))
    largest = max(float(np.abs(change.before.weights).max()), 1e-12)
    most = max(float(np.abs(change.weights).max()), LEAST * largest)
    colours = np.where(change.weights > 0, GAINED, LOST)
    _draw_sizes(weights, image, change.before, np.abs(change.before.weights) / largest, WEIGHT)
    _draw_sizes(changed, image, change.after, np.abs(change.weights) / most, colours)
    for axis, title in zip((weights, changed), titles, strict=True):
        axis.set_title(fill(title, style.LINE // 2))
    for axis in axes:
        axis.set(xticks=[], yticks=[])
    for axis in (weights, changed):
        axis.set(xlim=window[:2], ylim=(window[3], window[2]))
    _legend_of_changes(figure, change, largest, most, model)
    return style.save(figure, out)


def _window(change: SamplingChange, width: int, height: int) -> tuple[float, float, float, float]:
    """Choose the part of an image for a close-up around the points of most weight: left, right, top, bottom."""
    xy = []
    for points in (change.before, change.after):
        weights = np.abs(points.weights)
        xy += [points.xy[weights >= SEEN * weights.max()], points.reference]
        xy += [] if points.boxes is None else [points.boxes[:, :2], points.boxes[:, 2:]]
    shown = np.concatenate(xy).clip((0, 0), (width, height))
    middle = (shown.min(0) + shown.max(0)) / 2
    sides = (shown.max(0) - shown.min(0)) * 1.2
    # The close-up has the image's shape, is no narrower than a sixteenth of it, and lies inside.
    part = min(max(sides[0] / width, sides[1] / height, 1 / 16), 1)
    half = np.array([width, height]) * part / 2
    middle = middle.clip(half, np.array([width, height]) - half)
    (left, top), (right, bottom) = middle - half, middle + half
    return float(left), float(right), float(top), float(bottom)


def _draw_sizes(axis: Axes, image: np.ndarray, points: SamplingPoints, shares: np.ndarray, colours: Any) -> None:
    """Draw sampling points as circles whose size shows their share of attention, over their queries' boxes."""
    _draw_image(axis, image, dim=0.75)
    _draw_own_boxes(axis, points, BOX, width=1.2, rim=2.2)
    # A level with fewer points than another is padded.
    there = points.there
    sizes = shares[:, :, there].ravel()
    # Large dots are drawn first, so that they hide no small one.
    order = np.argsort(-sizes)
    xy = points.xy[:, :, there].reshape(-1, 2)[order]
    colours = np.broadcast_to(colours, shares.shape)[:, :, there].ravel()[order]
    look: dict[str, Any] = dict(edgecolors='white', linewidths=0.25, alpha=0.9)
    axis.scatter(xy[:, 0], xy[:, 1], s=1 + LARGEST * sizes[order], color=colours, **look)
    _draw_references(axis, points)


def _draw_image(axis: Axes, image: np.ndarray, dim: float = 0.6) -> None:
    """Draw an image dim and grey on an axis, so that coloured points on it can be seen."""
    height, width = image.shape[:2]
    grey = image.mean(-1, keepdims=True)
    pale = 255 - (255 - (0.6 * grey + 0.4 * image)) * dim
    axis.imshow(pale.clip(0, 255).astype(np.uint8), extent=(0, width, height, 0))


def _draw_own_boxes(axis: Axes, points: SamplingPoints, colour: str, *, width: float, rim: float) -> None:
    """Draw the boxes that the queries predict, if there are any, on a white line of the width ``rim``."""
    for box in () if points.boxes is None else points.boxes:
        style.add_box(axis, box, edgecolor='white', linewidth=rim)
        style.add_box(axis, box, edgecolor=colour, linewidth=width)


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


def _draw_points(axis: Axes, image: np.ndarray, points: SamplingPoints, largest: float) -> None:
    _draw_image(axis, image)
    _draw_contours(axis, points, image.shape[:2])
    there = points.there
    # Fine levels are drawn last, on top, as their points spread less.
    for place, level in reversed([*enumerate(points.levels)]):
        xy = points.xy[:, :, place, there[place]].reshape(-1, 2)
        weights = points.weights[:, :, place, there[place]].ravel()
        sizes = 2 + 40 * weights.clip(min=0) / largest
        look: dict[str, Any] = dict(
            color=style.COLOURS[level % len(style.COLOURS)], edgecolors='white', linewidths=0.25, alpha=0.85
        )
        # Above the labels of boxes.
        axis.scatter(xy[:, 0], xy[:, 1], s=sizes, zorder=4, **look)
    _draw_references(axis, points)


def _legend(
    figure: Figure,
    drawn: Sequence[tuple[str, SamplingPoints, Sample]],
    largest: float,
    boxes: Sequence[tuple[int, Sized]],
) -> None:
    entries = _dots_of_levels({level for _, points, _ in drawn for level in points.levels})
    entries.append(_dot(f'area: weight, {largest:.2f} the largest in all panels', 'grey', 42**0.5))
    entries.append(_reference())
    entries.append(_line('density of the weights', color='black', linewidth=0.6))
    if any(points.boxes is not None for _, points, _ in drawn):
        entries.append(_line('box that the query predicts', color=PREDICTED, linewidth=OWN))
    entries += _lines_of_boxes(boxes)
    lines = ', '.join(f'{share * 100:.0f}' for share in CONTOURS)
    note = (
        'Each dot is a point that a query looks at.\n'
        f'Thin lines: where the smoothed density of the weights is {lines} % of its highest value.'
    )
    style.legend(figure, entries, note=note, columns=3)


def _legend_of_changes(figure: Figure, change: SamplingChange, largest: float, most: float, model: str) -> None:
    gained = float(change.weights.max().clip(0))
    lost = float((-change.weights.min()).clip(0)) + 0.0
    entries = [
        _dot(f'largest weight, {largest:.2g}', WEIGHT, _side(1)),
        _dot(f'largest gain of a point, {gained:.2g}', GAINED, _side(gained / most)),
        _dot(f'largest loss of a point, {lost:.2g}', LOST, _side(lost / most)),
        _reference(),
    ]
    if change.before.boxes is not None:
        entries.append(_line('box that the query predicts', color=BOX))
    where = 'encoder' if change.after.is_encoder else 'decoder'
    queries = change.after.queries.tolist()
    numbers = ', '.join(map(str, queries))
    of, whose = (f'query {numbers}', "this query's") if len(queries) == 1 else (f'queries {numbers}', "these queries'")
    if len(queries) > MOST_NUMBERS:
        of = f'{len(queries)} queries'
    factor = largest / most
    times = f'{factor:.0f}' if factor >= 10 else f'{factor:.2g}'
    lines = [
        f'{model}, {where}: {change.after.path}, {of}'.removeprefix(', '),
        'Each dot is a point that the query looks at, in all heads and levels. Middle: its area is its weight; the '
        'weights of a head sum to 1.',
        f'Right: its area is the change of its weight, drawn {times} times as large: {change.moved:.1%} of {whose} '
        'attention moved from blue to orange points.',
        f'In the mean a point lies {change.shifted:.1f} pixels of the image away from where it is in the middle.',
    ]
    style.legend(figure, entries, note='\n'.join(lines), columns=3)


def _side(share: float) -> float:
    """Return the diameter, in points, of the dot of a share of the largest value."""
    return (1 + LARGEST * share) ** 0.5


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
    from matplotlib.patheffects import withStroke

    entries = []
    if any(len(found) for _, found in boxes):
        entries.append(_line(f'the {MOST_BOXES} best boxes of score {THRESHOLD:g} or more', color=PREDICTED))
    if any(known for known, _ in boxes):
        look: dict[str, Any] = dict(path_effects=[withStroke(linewidth=2.2, foreground='black')])
        entries.append(_line('true box', color='white', linestyle='--', **look))
    return entries
