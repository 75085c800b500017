"""Shapes: a generated data set for detection, instance and semantic segmentation, small enough to learn on a CPU.

The same images have COCO annotations and ADE20K label maps. Image ``i`` of a split depends only on the seed, the size
and ``i``.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from drawing import CLASSES, background, fragment_mask, shape_mask, texture

SPLITS = {'train': 'training', 'val': 'validation'}  # COCO's name: ADE20K's name
STAMP = 'shapes.json'
FORMAT = 1
MIN_SIZE = 64
MIN_PIXELS = 40


@dataclass(frozen=True)
class Difficulty:
    """Difficulty of the images.

    Attributes:
        objects: Smallest and largest number of objects that are tried in an image.
        diameters: Smallest and largest diameter, as shares of the image's side.
        min_visible: Least visible share of an object's area; an object that would hide more of another is not drawn.
        fragments: Smallest and largest number of pieces that are no objects but have their colours and surfaces.
    """

    objects: tuple[int, int]
    diameters: tuple[float, float]
    min_visible: float
    fragments: tuple[int, int]


DIFFICULTIES = {
    'plain': Difficulty((1, 4), (0.2, 0.5), 0.35, (0, 0)),
    'hard': Difficulty((4, 10), (0.12, 0.35), 0.25, (3, 9)),
}


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


def render(index: int, *, size: int = 128, seed: int = 0, split: str = 'train', difficulty: str = 'plain') -> Scene:
    """Draw image ``index`` of a split.

    Args:
        index: Number of the image, from 0.
        size: Side of the square image in pixels, at least 64.
        seed: Seed of the data set.
        split: ``'train'`` or ``'val'``.
        difficulty: A name of :data:`DIFFICULTIES`.

    Raises:
        ValueError: An argument out of range.
    """
    if index < 0 or seed < 0 or size < MIN_SIZE or split not in SPLITS or difficulty not in DIFFICULTIES:
        raise ValueError(
            f'index and seed must be 0 or more, size {MIN_SIZE} or more, split one of {", ".join(SPLITS)} and '
            f'difficulty one of {", ".join(DIFFICULTIES)}; got index={index}, seed={seed}, size={size}, '
            f'split={split!r}, difficulty={difficulty!r}.'
        )
    hard = DIFFICULTIES[difficulty]
    rng = np.random.default_rng((seed, list(SPLITS).index(split), index, size))
    image = background(rng, size)
    if hard.fragments[1]:
        for _ in range(int(rng.integers(hard.fragments[0], hard.fragments[1] + 1))):
            fragment = fragment_mask(rng, size, size * rng.uniform(*hard.diameters))
            image[fragment] = texture(rng, int(rng.integers(len(CLASSES))), size)[fragment]
    masks: list[np.ndarray] = []
    areas: list[int] = []
    labels: list[int] = []
    for _ in range(int(rng.integers(hard.objects[0], hard.objects[1] + 1))):
        label = int(rng.integers(len(CLASSES)))
        # log-uniform, so that small objects are as frequent as large ones
        diameter = size * float(np.exp(rng.uniform(*np.log(hard.diameters))))
        shape = shape_mask(rng, label, size, diameter)
        surface = texture(rng, label, size)
        remaining = [mask & ~shape for mask in masks]
        # An object that would hide another one too much, or is cut off itself, is left out of the image.
        hidden = any(m.sum() < max(hard.min_visible * a, MIN_PIXELS) for m, a in zip(remaining, areas, strict=True))
        if shape.sum() < MIN_PIXELS or hidden:
            continue
        image[shape] = surface[shape]
        masks = [*remaining, shape]
        areas = [*areas, int(shape.sum())]
        labels = [*labels, label]
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
    difficulty: str = 'plain',
    force: bool = False,
) -> bool:
    """Write the data set, or leave it if the folder holds the same one.

    ``root/{train,val}/*.jpg`` with ``root/annotations/instances_{train,val}.json`` are a COCO data set;
    ``root/ade/images/{training,validation}/*.jpg`` (the same files, hard-linked where the file system can) with
    ``root/ade/annotations/...*.png`` are an ADE20K data set, 0 being the background that mmseg reduces away.

    Args:
        root: Folder to write. It appears only when it is complete.
        num_train: Training images.
        num_val: Validation images.
        size: Side of the images in pixels, at least 64.
        seed: Seed of the data set.
        difficulty: A name of :data:`DIFFICULTIES`.
        force: Replace a shapes data set that was written with other arguments.

    Returns:
        True if files were written.

    Raises:
        ValueError: An argument out of range.
        FileExistsError: ``root`` holds shapes of other arguments and ``force`` is not set, or other files.
    """
    if min(num_train, num_val) < 1:
        raise ValueError(f'num_train and num_val must be 1 or more; got {num_train} and {num_val}.')
    drawn: dict[str, Any] = dict(size=size, seed=seed, difficulty=difficulty)

    def write(folder: Path) -> None:
        for split, count in (('train', num_train), ('val', num_val)):
            _write_split(folder, split, count, **drawn)

    recipe = dict(num_train=num_train, num_val=num_val, **drawn, format=FORMAT)
    return write_once(Path(root), STAMP, recipe, write, force=force)


def write_once(root: Path, stamp: str, recipe: dict[str, Any], write: Callable[[Path], None], *, force: bool) -> bool:
    """Write a folder that appears only when it is complete, or leave it if its file ``stamp`` holds the same recipe.

    Returns:
        True if files were written.

    Raises:
        FileExistsError: ``root`` holds files of another recipe and ``force`` is not set, or other files.
    """
    text = json.dumps(recipe)
    if root.exists() and (root.is_file() or any(root.iterdir())):
        if not (root / stamp).is_file():
            raise FileExistsError(f'{root} holds something that is no data set of this kind; choose another folder.')
        found = (root / stamp).read_text()
        if json.loads(found) == json.loads(text):
            return False
        if not force:
            raise FileExistsError(
                f'{root} holds what was made of {found.strip()}, not of {text}; choose another folder or pass '
                'force=True (--force).'
            )
    root.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root.parent, prefix=f'.{root.name}-') as folder:
        new = Path(folder) / 'new'
        old = Path(folder) / 'old'
        new.mkdir()
        write(new)
        (new / stamp).write_text(text)
        if root.exists():
            root.rename(old)
        new.rename(root)
    return True


def _write_split(root: Path, split: str, count: int, *, size: int, seed: int, difficulty: str) -> None:
    images = root / split
    ade_images = root / 'ade' / 'images' / SPLITS[split]
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
        scene = render(index, size=size, seed=seed, split=split, difficulty=difficulty)
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
            rows = np.flatnonzero(mask.any(1))
            columns = np.flatnonzero(mask.any(0))
            x = int(columns[0])
            y = int(rows[0])
            coco['annotations'].append(
                {
                    'id': len(coco['annotations']) + 1,
                    'image_id': index + 1,
                    'category_id': int(label) + 1,
                    'bbox': [x, y, int(columns[-1]) - x + 1, int(rows[-1]) - y + 1],
                    'area': int(mask.sum()),
                    'segmentation': _run_lengths(mask),
                    'iscrowd': 0,
                }
            )
        cv2.imwrite(str(ade_maps / f'{index:06d}.png'), semantic)
    (root / 'annotations' / f'instances_{split}.json').write_text(json.dumps(coco))


def _run_lengths(mask: np.ndarray) -> dict[str, Any]:
    """Return COCO's run lengths of a mask ``(H, W)``, column by column and the background first."""
    pixels = mask.flatten(order='F')
    begins = np.flatnonzero(np.diff(pixels, prepend=False))
    return dict(counts=np.diff(begins, prepend=0, append=len(pixels)).tolist(), size=list(mask.shape))
