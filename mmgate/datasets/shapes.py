"""Shapes: a generated data set for detection, instance and semantic segmentation, small enough to learn on a CPU.

One set of images carries COCO annotations and ADE20K label maps. Image ``i`` of a split depends on the seed, the size
and ``i`` alone.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from .outlines import outlines

CLASSES = ('circle', 'square', 'triangle', 'star', 'ring', 'cross')
SPLITS = {'train': 'training', 'val': 'validation'}  # COCO's name: ADE20K's name
STAMP = 'shapes.json'
FORMAT = 1
MIN_SIZE = 64
MAX_OBJECTS = 4
DIAMETERS = (0.2, 0.5)  # as shares of the image's side
HUE_SPREAD = 7.0  # half degrees; the classes lie 30 apart
MIN_VISIBLE = 0.35  # of an object's own area; below it an object is not drawn at all
MIN_PIXELS = 40


@dataclass(frozen=True)
class Scene:
    """One image with its objects.

    Attributes:
        image: ``(S, S, 3)`` uint8, BGR.
        masks: Visible part of every object, ``(n, S, S)`` bool; they do not overlap.
        labels: Index into :data:`CLASSES`, ``(n,)`` int64.
    """

    image: np.ndarray
    masks: np.ndarray
    labels: np.ndarray


@dataclass(frozen=True)
class _Recipe:
    num_train: int
    num_val: int
    size: int
    seed: int
    format: int = FORMAT


def render(index: int, *, size: int = 128, seed: int = 0, split: str = 'train') -> Scene:
    """Draw image ``index`` of a split.

    Args:
        index: Number of the image, from 0.
        size: Side of the square image in pixels, at least 64.
        seed: Seed of the data set.
        split: ``'train'`` or ``'val'``.

    Raises:
        ValueError: An argument out of range.
    """
    if index < 0 or seed < 0 or size < MIN_SIZE or split not in SPLITS:
        raise ValueError(
            f'index and seed must be 0 or more, size {MIN_SIZE} or more and split one of {", ".join(SPLITS)}; '
            f'got index={index}, seed={seed}, size={size}, split={split!r}.'
        )
    rng = np.random.default_rng((seed, list(SPLITS).index(split), index, size))
    image = background(rng, size)
    masks: list[np.ndarray] = []
    areas: list[int] = []
    labels: list[int] = []
    for _ in range(int(rng.integers(1, MAX_OBJECTS + 1))):
        label = int(rng.integers(len(CLASSES)))
        # log-uniform, so that small objects are as frequent as large ones
        diameter = size * float(np.exp(rng.uniform(*np.log(DIAMETERS))))
        shape = shape_mask(rng, label, size, diameter)
        surface = texture(rng, label, size)
        remaining = [mask & ~shape for mask in masks]
        # An object that would hide another one too much, or is cut off itself, is left out of the image.
        hidden = any(m.sum() < max(MIN_VISIBLE * a, MIN_PIXELS) for m, a in zip(remaining, areas, strict=True))
        if shape.sum() < MIN_PIXELS or hidden:
            continue
        image[shape] = surface[shape]
        masks, areas, labels = [*remaining, shape], [*areas, int(shape.sum())], [*labels, label]
    noise = rng.normal(0, rng.uniform(1, 6), image.shape)
    image = np.clip(image + noise, 0, 255).astype(np.uint8)
    stacked = np.stack(masks) if masks else np.zeros((0, size, size), bool)
    return Scene(image, stacked, np.asarray(labels, np.int64))


def write_shapes(
    root: str | os.PathLike[str],
    *,
    num_train: int = 400,
    num_val: int = 80,
    size: int = 128,
    seed: int = 0,
    force: bool = False,
) -> bool:
    """Write the data set, or leave it if the folder holds the same one.

    ``root/{train,val}/*.jpg`` with ``root/annotations/instances_{train,val}.json`` are a COCO data set;
    ``root/ade/images/{training,validation}/*.jpg`` (the same files, hard-linked where the file system can) with
    ``root/ade/annotations/...*.png`` are an ADE20K data set, 0 being the background that mmseg reduces away.

    Args:
        root: Folder to write. It appears complete or not at all.
        num_train: Training images.
        num_val: Validation images.
        size: Side of the images in pixels, at least 64.
        seed: Seed of the data set.
        force: Replace a shapes data set that was written with other arguments.

    Returns:
        Whether anything was written.

    Raises:
        ValueError: An argument out of range.
        FileExistsError: ``root`` holds other arguments' shapes and ``force`` is not set, or something else.
    """
    root = Path(root)
    recipe = _Recipe(num_train, num_val, size, seed)
    if num_train < 1 or num_val < 1 or size < MIN_SIZE or seed < 0:
        raise ValueError(
            f'num_train and num_val must be 1 or more, size {MIN_SIZE} or more, seed 0 or more; got {asdict(recipe)}.'
        )
    if root.exists() and (root.is_file() or any(root.iterdir())):
        stamp = root / STAMP
        if not stamp.is_file():
            raise FileExistsError(f'{root} holds something that is no shapes data set; choose another folder.')
        if json.loads(stamp.read_text()) == asdict(recipe):
            return False
        if not force:
            raise FileExistsError(
                f'{root} holds shapes of {stamp.read_text().strip()}, not of {json.dumps(asdict(recipe))}; '
                'choose another folder or pass force=True (--force).'
            )
    root.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root.parent, prefix=f'.{root.name}-') as folder:
        new, old = Path(folder) / 'new', Path(folder) / 'old'
        for split, count in (('train', num_train), ('val', num_val)):
            _write_split(new, split, count, size, seed)
        (new / STAMP).write_text(json.dumps(asdict(recipe)))
        if root.exists():
            root.rename(old)
        new.rename(root)
    return True


def _write_split(root: Path, split: str, count: int, size: int, seed: int) -> None:
    images, ade_images = root / split, root / 'ade' / 'images' / SPLITS[split]
    ade_maps = root / 'ade' / 'annotations' / SPLITS[split]
    for folder in (images, ade_images, ade_maps, root / 'annotations'):
        folder.mkdir(parents=True, exist_ok=True)
    coco: dict[str, Any] = {
        'info': {'description': f'mmgate shapes, {split}, seed {seed}', 'version': str(FORMAT)},
        'licenses': [],
        'images': [],
        'annotations': [],
        'categories': [{'id': i + 1, 'name': name, 'supercategory': 'shape'} for i, name in enumerate(CLASSES)],
    }
    for index in range(count):
        scene = render(index, size=size, seed=seed, split=split)
        name = f'{index:06d}.jpg'
        cv2.imwrite(str(images / name), scene.image, [cv2.IMWRITE_JPEG_QUALITY, 95])
        try:
            os.link(images / name, ade_images / name)
        except OSError:  # a file system without hard links
            shutil.copyfile(images / name, ade_images / name)
        semantic = np.zeros((size, size), np.uint8)
        coco['images'].append({'id': index + 1, 'file_name': name, 'width': size, 'height': size})
        for mask, label in zip(scene.masks, scene.labels, strict=True):
            semantic[mask] = label + 1
            rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
            x, y = int(columns[0]), int(rows[0])
            coco['annotations'].append(
                {
                    'id': len(coco['annotations']) + 1,
                    'image_id': index + 1,
                    'category_id': int(label) + 1,
                    'bbox': [x, y, int(columns[-1]) - x + 1, int(rows[-1]) - y + 1],
                    'area': int(mask.sum()),
                    'segmentation': outlines(mask),
                    'iscrowd': 0,
                }
            )
        cv2.imwrite(str(ade_maps / f'{index:06d}.png'), semantic)
    (root / 'annotations' / f'instances_{split}.json').write_text(json.dumps(coco))


def shape_mask(rng: np.random.Generator, label: int, size: int, diameter: float) -> np.ndarray:
    """Return the pixels of one rotated, slightly stretched shape whose centre lies in the image."""
    margin = diameter * 0.3
    cx, cy = rng.uniform(margin, size - margin, 2)
    angle, stretch, radius = rng.uniform(0, 2 * np.pi), rng.uniform(0.8, 1.25), diameter / 2
    y, x = np.mgrid[:size, :size] + 0.5
    dx, dy = x - cx, y - cy
    u = (dx * np.cos(angle) + dy * np.sin(angle)) / (radius * stretch)
    v = (-dx * np.sin(angle) + dy * np.cos(angle)) / radius * stretch
    distance, direction = np.hypot(u, v), np.arctan2(v, u)
    name = CLASSES[label]
    if name == 'circle':
        return distance < 1
    if name == 'ring':
        return (distance < 1) & (distance > rng.uniform(0.45, 0.6))
    if name == 'square':
        return np.maximum(np.abs(u), np.abs(v)) < 0.8
    if name == 'cross':
        arm = rng.uniform(0.25, 0.35)
        return (np.minimum(np.abs(u), np.abs(v)) < arm) & (np.maximum(np.abs(u), np.abs(v)) < 1)
    if name == 'triangle':
        return (v > -0.55) & (v < 1 - np.abs(u) * 1.75)
    # star: a radius that falls linearly with the angle from each of five tips
    to_tip = np.abs((direction * 5 / (2 * np.pi)) % 1 - 0.5) * 2
    return distance < 0.42 + 0.68 * to_tip**1.5


def _muted_colour(rng: np.random.Generator) -> np.ndarray:
    return np.clip(rng.uniform(20, 235) + rng.normal(0, 20, 3), 0, 255)


def _object_colours(rng: np.random.Generator, label: int) -> tuple[np.ndarray, np.ndarray]:
    """Return two saturated colours, the hue spread around the class's so that neighbouring classes overlap."""
    hue = (label * 180 / len(CLASSES) + rng.normal(0, HUE_SPREAD)) % 180  # OpenCV's hues are half degrees
    hsv = np.array([[[hue, 220, 235], [hue, rng.uniform(90, 220), rng.uniform(90, 170)]]], np.uint8)
    bgr = cv2.cvtColor(hsv, cv2.COLOR_HSV2BGR)[0].astype(np.float64)
    return bgr[0], bgr[1]


def texture(rng: np.random.Generator, label: int, size: int) -> np.ndarray:
    """Return a plain, graded, striped, checkered or speckled surface, ``(S, S, 3)``."""
    y, x = np.mgrid[:size, :size].astype(np.float64)
    first, second = _object_colours(rng, label)
    angle, period = rng.uniform(0, np.pi), rng.uniform(4, 14)
    along, across = x * np.cos(angle) + y * np.sin(angle), -x * np.sin(angle) + y * np.cos(angle)
    kind = int(rng.integers(5))
    share: np.ndarray
    if kind == 0:
        share = np.zeros((size, size))
    elif kind == 1:
        share = (along - along.min()) / np.ptp(along)
    elif kind == 2:
        share = (along // (period / 2) % 2).astype(np.float64)
    elif kind == 3:
        share = ((along // (period / 2) + across // (period / 2)) % 2).astype(np.float64)
    else:
        share = np.asarray(cv2.GaussianBlur(rng.random((size, size)), (0, 0), 1.0))
        share = (share - share.min()) / np.ptp(share)
    return first + (second - first) * share[..., None]


def background(rng: np.random.Generator, size: int) -> np.ndarray:
    """Return a soft background with strokes and specks, which are not annotated."""
    grid = int(rng.integers(2, 6))
    image = cv2.resize(_clutter_grid(rng, grid), (size, size), interpolation=cv2.INTER_CUBIC)
    for _ in range(int(rng.integers(0, 8))):
        start, end = rng.integers(0, size, 2), rng.integers(0, size, 2)
        thickness = int(rng.integers(1, 3))
        cv2.line(image, start.tolist(), end.tolist(), _muted_colour(rng).tolist(), thickness, cv2.LINE_AA)
    for _ in range(int(rng.integers(0, 12))):
        centre, radius = rng.integers(0, size, 2), int(rng.integers(1, max(2, size // 40)))
        cv2.circle(image, centre.tolist(), radius, _muted_colour(rng).tolist(), -1, cv2.LINE_AA)
    return image


def _clutter_grid(rng: np.random.Generator, grid: int) -> np.ndarray:
    grey = rng.uniform(60, 200)
    return np.clip(grey + rng.normal(0, 12, 3) + rng.normal(0, 25, (grid, grid, 1)), 0, 255)
