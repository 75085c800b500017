"""Pictures of predictions beside the ground truth."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import cv2
import mmcv
import numpy as np
import torch
from mmdet.structures import DetDataSample
from mmengine.config import Config
from mmengine.dataset import pseudo_collate
from mmengine.registry import DATASETS, MODELS, init_default_scope
from mmengine.runner import load_checkpoint

_SIDE = 384  # pixels of a tile
_TEXT = 0.5


def draw_predictions(
    config: str | Config, checkpoint: str, out: str | Path, *, images: int = 8, columns: int = 4, threshold: float = 0.3
) -> Path:
    """Draw boxes, and masks if there are, on the first ``images`` test images, ground truth in thin white.

    Args:
        config: A detector's config.
        checkpoint: Its checkpoint.
        out: PNG to write; folders are made.
        images: How many images.
        columns: Tiles in a row.
        threshold: Scores below it are not drawn.

    Returns:
        ``out`` as a path.
    """
    model, dataset = _load(config, checkpoint)
    names = dataset.metainfo['classes']
    tiles = [_tile(sample, names, threshold) for sample in _predict(model, dataset, images)]
    tiles += [np.full_like(tiles[0], 255)] * (-len(tiles) % columns)
    return _write(out, np.vstack([np.hstack(tiles[i : i + columns]) for i in range(0, len(tiles), columns)]))


def draw_segmentation(
    config: str | Config, checkpoint: str, out: str | Path, *, images: int = 8, opacity: float = 0.8
) -> Path:
    """Draw the first ``images`` test images, below each its predicted label map and the ground truth.

    Pixels that the ground truth ignores are left unpainted in both, as the metric leaves them out.

    Args:
        config: A segmentor's config.
        checkpoint: Its checkpoint.
        out: PNG to write; folders are made.
        images: How many images.
        opacity: Of the paint.

    Returns:
        ``out`` as a path.
    """
    model, dataset = _load(config, checkpoint)
    samples = _predict(model, dataset, images)
    palette = np.asarray(dataset.metainfo['palette'], np.float64)[:, ::-1]  # OpenCV's order
    columns = []
    for sample in samples:
        image = mmcv.imread(sample.img_path)
        truth, found = sample.gt_sem_seg.data[0].numpy(), sample.pred_sem_seg.data[0].numpy()
        counted = truth < len(palette)
        # the labels go on a dim grey copy, because an object may have its label's colour
        grey = 0.4 * image.mean(-1, keepdims=True).repeat(3, -1)
        painted = [cv2.resize(image, (_SIDE // 2,) * 2, interpolation=cv2.INTER_CUBIC)]
        for labels in (found, truth):
            canvas = grey.copy()
            canvas[counted] += opacity * (palette[labels[counted]] - canvas[counted])
            painted.append(cv2.resize(canvas.astype(np.uint8), (_SIDE // 2,) * 2, interpolation=cv2.INTER_NEAREST))
        columns.append(np.vstack(painted))
    return _write(out, np.hstack(columns))


def _load(config: str | Config, checkpoint: str) -> tuple[Any, Any]:
    """Return the model with its weights, in eval mode, and the test data set."""
    cfg = Config.fromfile(config) if isinstance(config, str) else config
    init_default_scope(cfg.default_scope)
    model = MODELS.build(deepcopy(cfg.model)).eval()  # mmdet writes into the config it builds from
    load_checkpoint(model, checkpoint, map_location='cpu')
    return model, DATASETS.build(cfg.test_dataloader.dataset)


def _predict(model: Any, dataset: Any, images: int) -> list[Any]:
    with torch.no_grad():
        return model.test_step(pseudo_collate([dataset[i] for i in range(min(images, len(dataset)))]))


def _write(out: str | Path, picture: np.ndarray) -> Path:
    path = Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    cv2.imwrite(str(path), picture)
    return path


def _tile(sample: DetDataSample, names: tuple[str, ...], threshold: float) -> np.ndarray:
    image = mmcv.imread(sample.img_path)
    scale = _SIDE / max(image.shape[:2])
    canvas = np.full((_SIDE, _SIDE, 3), 255, np.uint8)
    resized = cv2.resize(image, None, fx=scale, fy=scale, interpolation=cv2.INTER_CUBIC)
    canvas[: resized.shape[0], : resized.shape[1]] = resized
    truth = sample.gt_instances.bboxes / torch.tensor(sample.scale_factor).repeat(2)
    for box in truth:
        _box(canvas, box * scale, (255, 255, 255), 1)
    found = sample.pred_instances
    found = found[found.scores >= threshold]
    height, width = resized.shape[:2]
    part = canvas[:height, :width]
    # the object may have its label's colour: a chequered paint shows on it all the same
    rows, columns = np.mgrid[:height, :width]
    chequers = (rows // 4 + columns // 4) % 2 == 0
    for mask, label in zip(found.get('masks', []), found.labels, strict=False):
        inside = cv2.resize(mask.numpy().astype(np.uint8), (width, height), interpolation=cv2.INTER_NEAREST)
        part[(inside > 0) & chequers] = _colour(int(label), len(names))
        contours, _ = cv2.findContours(inside, cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_NONE)
        cv2.drawContours(part, contours, -1, (0, 0, 0), 1)
    for box, label, score in zip(found.bboxes, found.labels, found.scores, strict=True):
        colour = _colour(int(label), len(names))
        _box(canvas, box * scale, colour, 2)
        text = f'{names[int(label)]} {score:.2f}'
        (width, height), base = cv2.getTextSize(text, cv2.FONT_HERSHEY_SIMPLEX, _TEXT, 1)
        x = int(min(max(box[0] * scale, 0), _SIDE - width))
        y = int(min(max(box[1] * scale, height + base), _SIDE))
        cv2.rectangle(canvas, (x, y - height - base), (x + width, y), colour, -1)
        cv2.putText(canvas, text, (x, y - base // 2 - 1), cv2.FONT_HERSHEY_SIMPLEX, _TEXT, (0, 0, 0), 1, cv2.LINE_AA)
    return canvas


def _box(canvas: np.ndarray, box: torch.Tensor, colour: tuple[int, int, int], thickness: int) -> None:
    x0, y0, x1, y1 = (int(v) for v in box.round())
    cv2.rectangle(canvas, (x0, y0), (x1, y1), colour, thickness)


def _colour(label: int, count: int) -> tuple[int, int, int]:
    hsv = np.array([[[180 * label // max(count, 1), 160, 255]]], np.uint8)
    blue, green, red = cv2.cvtColor(hsv, cv2.COLOR_HSV2BGR)[0, 0].tolist()
    return blue, green, red
