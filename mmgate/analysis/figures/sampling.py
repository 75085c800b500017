"""Draw the sampling points of deformable attention on their image, with true and predicted boxes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from mmgate.analysis.figures import style
from mmgate.analysis.probes.sampling import SamplingChange, SamplingPoints, density

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

CONTOURS = np.array([0.1, 0.3, 0.5, 0.7, 0.9])  # shares of the highest density
PREDICTED = style.COLOURS[5]
THRESHOLD = 0.3  # boxes of lower scores are not drawn
MOST_BOXES = 10
# Of a difference: no colour of it has another meaning in the same figure.
GAINED = style.COLOURS[5]
LOST = style.COLOURS[0]
BOX = style.COLOURS[2]
WEIGHT = '0.2'
OWN = 2.2  # width of the outline of a query's own box
LARGEST = 70  # points squared of the largest dot
LEAST = 1e-3  # share of the largest weight that the largest change has at least, so that rounding is drawn small
SEEN = 0.05  # points of a smaller share of the largest weight may lie outside of a close-up


def draw_sampling(
    drawn: Sequence[tuple[str, SamplingPoints, Any]], out: str | Path, *, classes: Sequence[Sequence[str]] = ()
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
    for number, (axis, (title, points, sample)) in enumerate(zip(axes, drawn, strict=True)):
        where = 'encoder' if points.is_encoder else 'decoder'
        axis.set_title(f'{title}\n{where}: {style.short(points.path)}'.strip())
        axis.set(xlim=(0, width), ylim=(height, 0), xticks=[], yticks=[])
        colours = np.array([style.COLOURS[level % 8] for level in points.levels])[:, None]
        _draw_points(axis, image, points, points.weights.clip(min=0) / largest, colours, PREDICTED)
        _draw_density(axis, image, points)
        _draw_boxes(axis, sample, classes[number] if classes else ())
    levels = sorted({level for _, points, _ in drawn for level in points.levels})
    entries = [_dot(f'on level {n}{"" if n else ", the finest"}', style.COLOURS[n % 8], 6) for n in levels]
    entries.append(_dot(f'area: weight, {largest:.2f} the largest in all panels', 'grey', _side(1)))
    entries.append(_dot("query's reference point", 'white', 7, 'P', 'black'))
    entries.append(_line('density of the weights', color='black', linewidth=0.6))
    if any(points.boxes is not None for _, points, _ in drawn):
        entries.append(_line('box that the query predicts', color=PREDICTED, linewidth=OWN))
    labelled = {line.get_label(): line for axis in axes for line in axis.get_legend_handles_labels()[0]}
    lines = ', '.join(f'{share * 100:.0f}' for share in CONTOURS)
    note = (
        'Each dot is a point that a query looks at.\n'
        f'Thin lines: where the smoothed density of the weights is {lines} % of its highest value.'
    )
    style.legend(figure, [*entries, *labelled.values()], note=note, columns=3)
    return style.save(figure, out)


def _draw_density(axis: Axes, image: np.ndarray, points: SamplingPoints) -> None:
    of_queries = zip(points.xy, points.weights, strict=True)
    # Each query's density is estimated from its points alone.
    each = [density(xy[:, points.there], x[:, points.there], image.shape[:2]) for xy, x in of_queries]
    found = [values for values in each if values is not None]
    if found:
        heights = np.sum(found, axis=0)
        x = np.linspace(0, image.shape[1], heights.shape[1])
        y = np.linspace(0, image.shape[0], heights.shape[0])
        axis.contour(x, y, heights, levels=heights.max() * CONTOURS, colors='black', linewidths=0.6, alpha=0.55)


def _draw_boxes(axis: Axes, sample: Any, names: Sequence[str]) -> None:
    """Draw the true boxes, and the best predicted ones with class and score; one of each has a label for the legend."""
    from matplotlib.patheffects import withStroke

    look: dict[str, Any] = dict(path_effects=[withStroke(linewidth=2.2, foreground='black')])
    truth = sample.get('gt_instances')
    found = sample.get('pred_instances')
    for box in [] if truth is None or 'bboxes' not in truth else getattr(truth.bboxes, 'tensor', truth.bboxes).tolist():
        style.add_box(axis, box, edgecolor='black', linewidth=1.6)
        style.add_box(axis, box, edgecolor='white', linewidth=0.9, linestyle='--')
        axis.plot([], [], color='white', linestyle='--', label='true box', **look)
    if found is None or 'bboxes' not in found:
        return
    found = found[found.scores >= THRESHOLD]
    height = axis.get_ylim()[0]
    for instance in found[found.scores.argsort(descending=True)[:MOST_BOXES]]:
        left, top, *_ = box = instance.bboxes[0].tolist()
        style.add_box(axis, box, edgecolor=PREDICTED, linewidth=1.2)
        words = f'{style.class_name(int(instance.labels), names)} {float(instance.scores):.2f}'
        ground: dict[str, Any] = dict(facecolor=PREDICTED, edgecolor='none', pad=0.6)
        # The label is above the box where there is room.
        side = 'bottom' if top > 0.05 * height else 'top'
        font: dict[str, Any] = dict(fontsize=5.5, color='white', zorder=3.5 - 0.01 * len(axis.texts))  # the best on top
        axis.text(max(left, 0), max(top, 0), words, va=side, clip_on=True, bbox=ground, **font)
        axis.plot([], [], color=PREDICTED, label=f'the {MOST_BOXES} best boxes of score {THRESHOLD:g} or more')


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
    left, right, top, bottom = _window(change, width, height)
    of_rest = 1.2  # titles, legend
    figure, (axes,) = style.panels(1, 3, height=(style.WIDTH - 0.3) / 3 * height / width + of_rest)
    axes[0].imshow(image, extent=(0, width, height, 0))
    style.add_box(axes[0], (left, top, right, bottom), edgecolor='black', linewidth=2.4)
    style.add_box(axes[0], (left, top, right, bottom), edgecolor='white', linewidth=1.2)
    axes[0].set(title='the image, and the close-up', xlim=(0, width), ylim=(height, 0), xticks=[], yticks=[])
    largest = max(float(np.abs(change.before.weights).max()), 1e-12)
    most = max(float(np.abs(change.weights).max()), LEAST * largest)
    colours = np.where(change.weights > 0, GAINED, LOST)
    _draw_points(axes[1], image, change.before, np.abs(change.before.weights) / largest, WEIGHT, BOX)
    _draw_points(axes[2], image, change.after, np.abs(change.weights) / most, colours, BOX)
    for axis, title in zip(axes[1:], titles, strict=True):
        axis.set_title(fill(title, style.LINE // 2))
        axis.set(xlim=(left, right), ylim=(bottom, top), xticks=[], yticks=[])
    gained = float(change.weights.max().clip(0))
    lost = float((-change.weights.min()).clip(0)) + 0.0
    entries = [
        _dot(f'largest weight, {largest:.2g}', WEIGHT, _side(1)),
        _dot(f'largest gain of a point, {gained:.2g}', GAINED, _side(gained / most)),
        _dot(f'largest loss of a point, {lost:.2g}', LOST, _side(lost / most)),
        _dot("query's reference point", 'white', 7, 'P', 'black'),
    ]
    if change.before.boxes is not None:
        entries.append(_line('box that the query predicts', color=BOX, linewidth=OWN))
    queries = change.after.queries.tolist()
    of = f'query {queries[0]}' if len(queries) == 1 else f'{len(queries)} queries'
    factor = largest / most
    lines = [
        f'{model}, {"encoder" if change.after.is_encoder else "decoder"}: {change.after.path}, {of}'.removeprefix(', '),
        'Each dot is a point that the query looks at, in all heads and levels. Middle: its area is its weight; the '
        'weights of a head sum to 1.',
        f'Right: its area is the change of its weight, drawn {factor:{".0f" if factor >= 10 else ".2g"}} times as '
        f'large: {change.moved:.1%} of attention moved from blue to orange points.',
        f'In the mean a point lies {change.shifted:.1f} pixels of the image away from where it is in the middle.',
    ]
    style.legend(figure, entries, note='\n'.join(lines), columns=3)
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


def _draw_points(
    axis: Axes, image: np.ndarray, points: SamplingPoints, shares: np.ndarray, colours: Any, of_box: str
) -> None:
    """Draw an image dim and grey, the boxes that queries predict, and points whose size is their share of attention."""
    height, width = image.shape[:2]
    grey = image.mean(-1, keepdims=True)
    pale = 255 - (255 - (0.6 * grey + 0.4 * image)) * 0.7
    axis.imshow(pale.clip(0, 255).astype(np.uint8), extent=(0, width, height, 0))
    boxes: Iterable[Any] = () if points.boxes is None else points.boxes
    for box in boxes:
        style.add_box(axis, box, edgecolor='white', linewidth=OWN + 1.2)
        style.add_box(axis, box, edgecolor=of_box, linewidth=OWN)
    there = points.there
    sizes = shares[:, :, there].ravel()
    # Large dots are drawn first, so that they hide no small one.
    order = np.argsort(-sizes)
    xy = points.xy[:, :, there].reshape(-1, 2)[order]
    colours = np.broadcast_to(colours, shares.shape)[:, :, there].ravel()[order]
    look: dict[str, Any] = dict(edgecolors='white', linewidths=0.25, alpha=0.9)
    # Above the labels of boxes.
    axis.scatter(xy[:, 0], xy[:, 1], s=1 + LARGEST * sizes[order], zorder=4, color=colours, **look)
    look = dict(color='white', edgecolors='black', linewidths=0.9)
    axis.scatter(points.reference[:, 0], points.reference[:, 1], s=60, marker='P', zorder=5, **look)


def _side(share: float) -> float:
    """Return the diameter, in points, of the dot of a share of the largest value."""
    return (1 + LARGEST * share) ** 0.5


def _dot(label: str, colour: str, size: float, marker: str = 'o', edge: str = 'white') -> Line2D:
    return _line(label, linestyle='', marker=marker, color=colour, markeredgecolor=edge, markersize=size)


def _line(label: str, **look: Any) -> Line2D:
    from matplotlib.lines import Line2D

    return Line2D([], [], label=label, **look)
