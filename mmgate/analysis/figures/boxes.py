"""True and predicted boxes on an image, with class and score."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mmgate.analysis.figures.style import COLOURS, add_box, class_name

PREDICTED = COLOURS[5]
THRESHOLD = 0.3  # boxes of lower scores are not drawn
MOST_BOXES = 10


def draw_boxes(axis: Any, sample: Any) -> tuple[int, Any]:
    """Draw true boxes and the best predicted ones; return the number of the first, and the second, best first."""
    truth, found = sample.get('gt_instances'), sample.get('pred_instances')
    known = [] if truth is None or 'bboxes' not in truth else getattr(truth.bboxes, 'tensor', truth.bboxes).tolist()
    for box in known:
        add_box(axis, box, edgecolor='black', linewidth=1.6)
        add_box(axis, box, edgecolor='white', linewidth=0.9, linestyle='--')
    if found is None or 'bboxes' not in found:
        return len(known), ()
    found = found[found.scores >= THRESHOLD]
    found = found[found.scores.argsort(descending=True)[:MOST_BOXES]]
    for box in found.bboxes:
        add_box(axis, box, edgecolor=PREDICTED, linewidth=1.2)
    return len(known), found


def label_boxes(axis: Any, found: Any, names: Sequence[str]) -> None:
    """Write class and score at the upper left corner of each box where they hide no better one's, or not at all."""
    height, taken = axis.get_ylim()[0], list[Any]()
    for instance in found:
        (left, top, *_), label = instance.bboxes[0].tolist(), int(instance.labels)
        said, place = f'{class_name(label, names)} {float(instance.scores):.2f}', (max(left, 0), max(top, 0))
        look = dict(facecolor=PREDICTED, edgecolor='none', pad=0.6)
        side = 'bottom' if top > 0.05 * height else 'top'  # above the box where there is room
        text = axis.text(*place, said, fontsize=5.5, color='white', va=side, clip_on=True, bbox=look)
        extent = text.get_window_extent()
        if any(extent.overlaps(other) for other in taken):
            text.remove()
        else:
            taken.append(extent)
