"""Draw a detector's true and predicted boxes on an image, with class and score."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mmgate.analysis.figures.style import COLOURS, add_box, class_name
from mmgate.analysis.probes.recording import Sample

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.transforms import BboxBase
    from mmengine.structures import InstanceData

PREDICTED = COLOURS[5]
THRESHOLD = 0.3  # boxes of lower scores are not drawn
MOST_BOXES = 10


def draw_boxes(axis: Axes, sample: Sample) -> tuple[int, InstanceData | tuple[()]]:
    """Draw true and predicted boxes on an axis; return how many are true, and the predictions drawn, best first."""
    truth = sample.get('gt_instances')
    found = sample.get('pred_instances')
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


def label_boxes(axis: Axes, found: InstanceData | tuple[()], names: Sequence[str]) -> None:
    """Write class and score at the upper left corner of each box; leave out a label that would hide a better box's."""
    height = axis.get_ylim()[0]
    taken: list[BboxBase] = []
    for instance in found:
        left, top, *_ = instance.bboxes[0].tolist()
        words = f'{class_name(int(instance.labels), names)} {float(instance.scores):.2f}'
        look: dict[str, Any] = dict(facecolor=PREDICTED, edgecolor='none', pad=0.6)
        # The label is above the box where there is room.
        side = 'bottom' if top > 0.05 * height else 'top'
        font: dict[str, Any] = dict(fontsize=5.5, color='white')
        text = axis.text(max(left, 0), max(top, 0), words, va=side, clip_on=True, bbox=look, **font)
        extent = text.get_window_extent()
        if any(extent.overlaps(other) for other in taken):
            text.remove()
        else:
            taken.append(extent)
