"""Two images for training and two for a test, in the files of the papers' small image data sets."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

SHADES = dict(train=100, test=200)  # of red, or of grey where the data set is grey
LABELS = [3, 0]
SETS = ('cifar10', 'cifar100', 'fashionmnist', 'svhn')


def images_of(name: str, split: str) -> np.ndarray:
    """Return the images of a split, RGB ``(2, h, w, 3)``; the upper half of the second is black."""
    side = 28 if name == 'fashionmnist' else 32
    images = np.zeros((2, side, side, 3), np.uint8)
    images[..., : 3 if name == 'fashionmnist' else 1] = SHADES[split]
    images[1, : side // 2] = 0
    return images


def write_images(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a data set's files into a folder, and let mmpretrain take them for those that are published."""
    images = {split: images_of(name, split) for split in SHADES}
    if name == 'svhn':
        savemat = pytest.importorskip('scipy.io', reason='scipy').savemat
        labels = np.array([[label or 10] for label in LABELS], np.uint8)
        for split, shown in images.items():
            savemat(folder / f'{split}_32x32.mat', dict(X=shown.transpose(1, 2, 3, 0), y=labels))
    elif name == 'fashionmnist':
        for split, start in dict(train='train', test='t10k').items():
            head = np.array([2051, *images[split].shape[:3]], '>i4').tobytes()
            (folder / f'{start}-images-idx3-ubyte').write_bytes(head + images[split][..., 0].tobytes())
            head = np.array([2049, len(LABELS)], '>i4').tobytes()
            (folder / f'{start}-labels-idx1-ubyte').write_bytes(head + bytes(LABELS))
    else:
        from mmpretrain.datasets import CIFAR10, CIFAR100

        kind, key = (CIFAR10, 'labels') if name == 'cifar10' else (CIFAR100, 'fine_labels')
        (folder / kind.base_folder).mkdir()
        for split, shown in images.items():
            content = {'data': shown.transpose(0, 3, 1, 2).reshape(len(shown), -1), key: LABELS}
            (folder / kind.base_folder / split).write_bytes(pickle.dumps(content))
            monkeypatch.setattr(kind, f'{split}_list', [[split, None]])  # the file's name, no checksum
