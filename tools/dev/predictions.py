"""Pictures of predictions and the ground truth."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mmcv
import numpy as np
from mmengine.config import Config

from mmgate.analysis.figures.boxes import draw_boxes, label_boxes
from mmgate.analysis.figures.style import legend, panels, save
from mmgate.analysis.loading import class_names, load_model
from mmgate.analysis.probes.recording import predict
from mmgate.train.config_file import read_config


def draw_predictions(config: str, checkpoint: str, out: Path) -> Path:
    """Draw boxes, and masks if there are, on eight test images of a detector, true boxes dashed; return the path."""
    cfg = read_config(config)
    return draw_detections(_predict(cfg, checkpoint), class_names(cfg), out, columns=4)


def draw_detections(samples: Sequence[Any], classes: Sequence[str], out: Path, *, columns: int) -> Path:
    """Draw data samples with predictions in the same way."""
    figure, axes = panels(-(-len(samples) // columns), columns, height=2.4, width=2.3 * columns)
    for axis in axes.flat:
        axis.set_axis_off()
    drawn = []
    for axis, sample in zip(axes.flat, samples, strict=False):
        image = mmcv.imread(sample.img_path, channel_order='rgb')
        height, width = image.shape[:2]
        axis.imshow(image, extent=(0, width, height, 0))
        _, found = draw_boxes(axis, sample)
        for mask, label in zip(found.get('masks', ()), found.labels, strict=False) if len(found) else ():
            painted = np.ma.masked_equal(np.asarray(mask) * (int(label) % 10 + 1), 0)
            axis.imshow(painted, cmap='tab10', vmin=1, vmax=10, alpha=0.6, extent=(0, width, height, 0))
        drawn.append((axis, found))
    # The layout decides which labels would hide one another. It is made now and kept.
    figure.draw_without_rendering()
    figure.set_layout_engine('none')
    for axis, found in drawn:
        label_boxes(axis, found, classes)
    return save(figure, out)


def draw_segmentation(config: str, checkpoint: str, out: Path) -> Path:
    """Draw eight test images of a segmentor, below each its predicted label map and the true one; return the path.

    Pixels that the ground truth ignores are left unpainted in both, as the metric leaves them out.
    """
    from matplotlib.patches import Patch

    cfg = read_config(config)
    samples = _predict(cfg, checkpoint)
    classes = class_names(cfg)
    figure, axes = panels(3, len(samples), height=1.3, width=1.2 * len(samples) + 0.6)
    for column, sample in zip(axes.T, samples, strict=True):
        image = mmcv.imread(sample.img_path, channel_order='rgb')
        truth, found = (field.data[0].numpy() for field in (sample.gt_sem_seg, sample.pred_sem_seg))
        column[0].imshow(image)
        for axis, labels in zip(column[1:], (found, truth), strict=True):
            # a grey copy, because an object may have its label's colour
            axis.imshow(image.mean(-1), cmap='gray', vmax=400)
            counted = np.ma.masked_where(truth >= len(classes), labels % 10)
            axis.imshow(counted, cmap='tab10', vmin=0, vmax=9, alpha=0.8, interpolation='nearest')
    for axis, label in zip(axes[:, 0], ('image', 'predicted', 'true'), strict=True):
        axis.set_ylabel(label)
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
    patches = [Patch(color=f'C{number % 10}', label=name) for number, name in enumerate(classes)]
    legend(figure, patches, columns=len(classes))
    return save(figure, out)


def _predict(cfg: Config, checkpoint: str) -> list[Any]:
    loaded = load_model(cfg, checkpoint)
    batches = loaded.inputs(Namespace(images=None, split='test', max_images=8))
    return [predict(loaded.model, batch) for batch in batches]
