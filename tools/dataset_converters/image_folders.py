"""Images for classification in ImageNet's layout, ``root/{train,val}/class/*``: shapes, handwritten digits."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from drawing import CLASSES, HUE_SPREAD, background, shape_mask, texture
from shapes import MIN_PIXELS, MIN_SIZE, SPLITS, write_once

STAMP = 'images.json'
DIAMETERS = (0.3, 0.9)  # as shares of the image's side
DIGITS_SHARE = 0.2  # of every digit, for validation
LARGEST_VALUE = 16  # of a pixel in scikit-learn's digits


def render_object(index: int, label: int, *, size: int = 64, seed: int = 0, split: str = 'train') -> np.ndarray:
    """Draw one object of a class in the style of :func:`shapes.render`, ``(S, S, 3)`` uint8, BGR.

    Args:
        index: Number of the image within its class, from 0.
        label: Index into :data:`drawing.CLASSES`.
        size: Side of the image in pixels, at least 64.
        seed: Seed of the data set.
        split: ``'train'`` or ``'val'``.
    """
    rng = np.random.default_rng((seed, list(SPLITS).index(split), index, size, label))
    image = background(rng, size)
    mask = np.zeros((size, size), bool)
    while mask.sum() < MIN_PIXELS:
        mask = shape_mask(rng, label, size, size * float(np.exp(rng.uniform(*np.log(DIAMETERS)))))
    image[mask] = texture(rng, label, size)[mask]
    noise = rng.normal(0, rng.uniform(1, 6), image.shape)
    return np.clip(image + noise, 0, 255).astype(np.uint8)


def write_shapes_folder(
    root: str | os.PathLike[str],
    *,
    num_train: int = 1200,
    num_val: int = 240,
    size: int = 64,
    seed: int = 0,
    force: bool = False,
) -> bool:
    """Write images of one object each, ``num_train`` and ``num_val`` in total, the same number for each class.

    Returns:
        True if files were written; False if the folder held the same ones already.

    Raises:
        ValueError: An argument out of range.
        FileExistsError: ``root`` holds other images and ``force`` is not set, or something else.
    """
    counts = {'train': num_train // len(CLASSES), 'val': num_val // len(CLASSES)}
    if min(counts.values()) < 1 or size < MIN_SIZE or seed < 0:
        raise ValueError(
            f'num_train and num_val must be {len(CLASSES)} or more, size {MIN_SIZE} or more, seed 0 or more; got '
            f'num_train={num_train}, num_val={num_val}, size={size}, seed={seed}.'
        )
    recipe = dict(content='shapes', **counts, size=size, seed=seed, diameters=DIAMETERS, hue_spread=HUE_SPREAD)
    images = (
        (split, name, f'{index:05d}.jpg', render_object(index, label, size=size, seed=seed, split=split))
        for split, count in counts.items()
        for label, name in enumerate(CLASSES)
        for index in range(count)
    )
    return _write(Path(root), recipe, images, force)


def write_digits(root: str | os.PathLike[str], *, size: int = 32, seed: int = 0, force: bool = False) -> bool:
    """Write scikit-learn's 1,797 handwritten digits, which come with the package, as images of ``size`` x ``size``.

    The originals have 8 x 8 pixels. The last fifth of each digit, in an order that ``seed`` shuffles, is for
    validation.

    Returns:
        True if files were written; False if the folder held the same ones already.

    Raises:
        ImportError: scikit-learn is not installed.
        ValueError: ``size`` is below 8, or ``seed`` below 0.
        FileExistsError: ``root`` holds other images and ``force`` is not set, or something else.
    """
    if size < 8 or seed < 0:
        raise ValueError(f'size must be 8 or more and seed 0 or more; got size={size}, seed={seed}.')
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise ImportError('The digits come with scikit-learn: pip install scikit-learn.') from error
    digits = load_digits()

    def images() -> Iterable[tuple[str, str, str, np.ndarray]]:
        rng = np.random.default_rng(seed)
        for label in range(10):
            indices = rng.permutation(np.flatnonzero(digits.target == label))
            held_out = set(indices[: round(DIGITS_SHARE * len(indices))].tolist())
            for index in indices.tolist():
                grey = np.round(digits.images[index] * (255 / LARGEST_VALUE)).astype(np.uint8)
                image = cv2.resize(grey, (size, size), interpolation=cv2.INTER_CUBIC)
                yield 'val' if index in held_out else 'train', str(label), f'{index:04d}.png', image

    return _write(Path(root), dict(content='digits', size=size, seed=seed), images(), force)


def _write(root: Path, recipe: dict[str, Any], images: Iterable[tuple[str, str, str, np.ndarray]], force: bool) -> bool:
    """Write ``(split, class, file, image)``."""

    def write(folder: Path) -> None:
        for split, name, file, image in images:
            (folder / split / name).mkdir(parents=True, exist_ok=True)
            cv2.imwrite(str(folder / split / name / file), image)

    return write_once(root, STAMP, recipe, write, force=force)
