"""True and predicted boxes on an image, with class and score."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mmgate.analysis.figures.style import COLOURS, add_box, class_name

PREDICTED = COLOURS[5]
THRESHOLD = 0.3  # boxes of lower scores are not drawn
MOST_BOXES = 10


def draw_boxes(axis: Any, sample: Any, threshold: float) -> tuple[int, Any]:
    """Draw true boxes and the best predicted ones; return the number of the first, and the second, best first."""
    truth, found = sample.get('gt_instances'), sample.get('pred_instances')
    known = [] if truth is None or 'bboxes' not in truth else getattr(truth.bboxes, 'tensor', truth.bboxes).tolist()
    for box in known:
        add_box(axis, box, edgecolor='black', linewidth=1.6)
        add_box(axis, box, edgecolor='white', linewidth=0.9, linestyle='--')
    if found is None or 'bboxes' not in found:
        return len(known), ()
    found = found[found.scores >= threshold]
    found = found[found.scores.argsort(descending=True)[:MOST_BOXES]]
    for box in found.bboxes:
        add_box(axis, box, edgecolor=PREDICTED, linewidth=1.2)
    return len(known), found


def label_boxes(axis: Any, found: Any, names: Sequence[str], size: tuple[int, int]) -> None:
    """Write class and score at the first corner of each box where they hide no better one's, or not at all."""
    (height, width), taken = size, list[Any]()
    for instance in found:
        (left, top, right, bottom), label = instance.bboxes[0].tolist(), int(instance.labels)
        x0, y0, x1, y1 = max(left, 0), max(top, 0), min(right, width), min(bottom, height)
        above, below = ('bottom' if y0 > 0.05 * height else 'top'), ('top' if y1 < 0.95 * height else 'bottom')
        said = f'{class_name(label, names)} {float(instance.scores):.2f}'
        for x, y, ha, va in (
            (x0, y0, 'left', above),
            (x1, y0, 'right', above),
            (x0, y1, 'left', below),
            (x1, y1, 'right', below),
        ):
            text = axis.text(x, y, said, fontsize=5.5, color='white', ha=ha, va=va, clip_on=True,
                             bbox=dict(facecolor=PREDICTED, edgecolor='none', pad=0.6))  # fmt: skip
            extent = text.get_window_extent()
            if not any(extent.overlaps(other) for other in taken):
                taken.append(extent)
                break
            text.remove()
