"""Sampling points drawn on their image."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mmcv
import numpy as np

from mmgate.analysis.figures.style import COLOURS, SEQUENTIAL, WIDTH, panels, save, short, wrap
from mmgate.analysis.probes.sampling import SamplingPoints, density

THRESHOLD = 0.3  # boxes of lower scores are not drawn
MOST_BOXES = 10


def draw_sampling(
    drawn: Sequence[tuple[str, SamplingPoints, Any]], out: Path | None, *, threshold: float = THRESHOLD
) -> np.ndarray:
    """Draw points sized by weight, coloured by level, their kernel density, true and predicted boxes; panels by twos.

    Args:
        drawn: For each panel its title, its points and the data sample of its image (with predictions, if any).
        out: PNG to write; None writes nothing.
        threshold: Predicted boxes of lower scores are left out.

    Returns:
        The picture ``(h, w, 3)``, RGB.
    """
    image = mmcv.imread(drawn[0][2].img_path, channel_order='rgb')
    height, width = image.shape[:2]
    columns = min(len(drawn), 2)
    rows = -(-len(drawn) // columns)
    across = WIDTH if columns == 2 else 4.6
    figure, axes = panels(rows, columns, height=across / columns * height / width + 0.6, width=across)
    for axis in axes.flat[len(drawn) :]:
        axis.set_axis_off()
    levels = sorted({level for _, points, _ in drawn for level in points.levels})
    # one scale of sizes for all panels, so that they can be compared
    largest = max(max(float(points.weights.max()) for _, points, _ in drawn), 1e-12)
    for axis, (title, points, sample) in zip(axes.flat, drawn, strict=False):
        _panel(axis, image, points, largest)
        _boxes(axis, sample, threshold)
        where = 'encoder' if points.is_encoder else 'decoder'
        axis.set_title(f'{title}\n{where}: {short(points.path)}'.strip(), fontsize=8)
        axis.set(xlim=(0, width), ylim=(height, 0), xticks=[], yticks=[])
    _legend(figure, levels, largest, [sample for *_, sample in drawn], threshold)
    figure.draw_without_rendering()  # the layout decides which scores would hide one another, and is kept
    figure.set_layout_engine('none')
    for axis, (*_, sample) in zip(axes.flat, drawn, strict=False):
        _scores(axis, sample, threshold)
    if out is not None:
        save(figure, out)
    figure.canvas.draw()
    return np.asarray(figure.canvas.buffer_rgba())[..., :3].copy()


def draw_densities(models: Sequence[tuple[str, np.ndarray]], out: Path, *, images: int) -> Path:
    """Draw densities ``(steps, steps)`` of points over images, a panel each, on one scale; return the path.

    Args:
        models: Their names and :func:`~mmgate.analysis.probes.sampling.mean_density`.
        out: PNG to write.
        images: How many there were.
    """
    figure, (axes,) = panels(1, len(models), height=3.2, width=3.2 * len(models) + 0.6)
    high = max(float(values.max()) for _, values in models)
    for axis, (title, values) in zip(axes, models, strict=True):
        drawn = axis.imshow(values, cmap=SEQUENTIAL, vmin=0, vmax=high, extent=(0, 1, 1, 0))
        axis.set(title=wrap(title, 34), xlabel="share of the image's width", ylabel='of its height')
    bar = figure.colorbar(drawn, ax=axes, shrink=0.8)
    bar.ax.tick_params(labelsize=7)
    bar.set_label(f'density of points on the finest level,\n{images} images; 1: even', fontsize=8)
    return save(figure, out)


def _panel(axis: Any, image: np.ndarray, points: SamplingPoints, largest: float) -> None:
    height, width = image.shape[:2]
    # dim and grey, so that the colours of the levels stand out
    grey = image.mean(-1, keepdims=True)
    pale = 255 - (255 - (0.6 * grey + 0.4 * image)) * 0.6
    axis.imshow(pale.clip(0, 255).astype(np.uint8), extent=(0, width, height, 0))
    each = [density(xy, weights, (height, width)) for xy, weights in zip(points.xy, points.weights, strict=True)]
    heights = np.sum(
        [found for found in each if found is not None], axis=0
    )  # a query's points say nothing of another's
    if np.max(heights) > 0:
        x, y = np.linspace(0, width, heights.shape[1]), np.linspace(0, height, heights.shape[0])
        shares = heights.max() * np.array([0.1, 0.3, 0.5, 0.7, 0.9])
        axis.contour(x, y, heights, levels=shares, colors='black', linewidths=0.6, alpha=0.55)
    for place, level in reversed([*enumerate(points.levels)]):  # fine levels on top: their points spread less
        xy, weights = points.xy[:, :, place].reshape(-1, 2), points.weights[:, :, place].ravel()
        sizes = 2 + 40 * weights.clip(min=0) / largest
        style = dict(color=COLOURS[level % len(COLOURS)], edgecolors='white', linewidths=0.25, alpha=0.85)
        axis.scatter(*xy.T, s=sizes, **style)
    axis.scatter(*points.reference.T, s=60, marker='P', color='white', edgecolors='black', linewidths=0.9, zorder=5)


def _boxes(axis: Any, sample: Any, threshold: float) -> None:
    from matplotlib.patches import Rectangle

    def rectangle(box: Any, **style: Any) -> None:
        x0, y0, x1, y1 = (float(v) for v in box)
        axis.add_patch(Rectangle((x0, y0), x1 - x0, y1 - y0, fill=False, **style))

    truth = sample.get('gt_instances')
    if truth is not None and 'bboxes' in truth:
        scale = np.tile(np.asarray(sample.get('scale_factor') or (1.0, 1.0), np.float64)[:2], 2)
        boxes = getattr(truth.bboxes, 'tensor', truth.bboxes)
        for box in np.asarray(boxes.cpu(), np.float64).reshape(-1, 4) / scale:
            rectangle(box, edgecolor='black', linewidth=1.6)
            rectangle(box, edgecolor='white', linewidth=0.9, linestyle='--')
    for box, _ in _predicted(sample, threshold):
        rectangle(box, edgecolor=COLOURS[5], linewidth=1.2)


def _predicted(sample: Any, threshold: float) -> list[tuple[list[float], float]]:
    """Return the boxes that are drawn and their scores, the best first."""
    found = sample.get('pred_instances')
    if found is None or 'bboxes' not in found:
        return []
    found = found[found.scores >= threshold]
    order = found.scores.argsort(descending=True)[:MOST_BOXES]
    return list(zip(found.bboxes[order].tolist(), found.scores[order].tolist(), strict=True))


def _scores(axis: Any, sample: Any, threshold: float) -> None:
    """Write each score at the first corner of its box where it hides no better one, or not at all."""
    height, width = sample.ori_shape[:2]
    taken: list[Any] = []
    for (left, top, right, bottom), score in _predicted(sample, threshold):
        x0, x1, y0, y1 = max(left, 0), min(right, width), max(top, 0), min(bottom, height)
        above, below = ('bottom' if y0 > 0.05 * height else 'top'), ('top' if y1 < 0.95 * height else 'bottom')
        corners = [(x0, y0, 'left', above), (x1, y0, 'right', above), (x0, y1, 'left', below), (x1, y1, 'right', below)]
        for x, y, ha, va in corners:
            text = axis.text(x, y, f'{score:.2f}', fontsize=6, color='white', ha=ha, va=va, clip_on=True,
                             bbox=dict(facecolor=COLOURS[5], edgecolor='none', pad=0.6))  # fmt: skip
            extent = text.get_window_extent()
            if not any(extent.overlaps(other) for other in taken):
                taken.append(extent)
                break
            text.remove()


def _legend(figure: Any, levels: Sequence[int], largest: float, samples: Sequence[Any], threshold: float) -> None:
    from matplotlib.lines import Line2D

    def dot(label: str, colour: str, size: float, marker: str = 'o', edge: str = 'white') -> Any:
        style: dict[str, Any] = dict(marker=marker, color=colour, markeredgecolor=edge, markersize=size)
        return Line2D([], [], linestyle='', label=label, **style)

    entries = [dot(f'level {level}', COLOURS[level % len(COLOURS)], 6) for level in levels]
    entries.append(dot(f'largest weight {largest:.2f}', 'grey', 42**0.5))
    entries.append(dot('reference', 'white', 7, 'P', 'black'))
    if any(_predicted(sample, threshold) for sample in samples):
        entries.append(Line2D([], [], color=COLOURS[5], label='predicted'))
    truth = [sample.get('gt_instances') for sample in samples]
    if any(each is not None and 'bboxes' in each and len(each.bboxes) for each in truth):
        entries.append(Line2D([], [], color='black', linestyle='--', label='ground truth'))
    figure.legend(handles=entries, loc='outside lower center', ncols=4, fontsize=7, frameon=False)
