"""The data set Street View House Numbers (SVHN): photographs of single digits, read from the authors' files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from mmengine.dataset import BaseDataset

from mmgate.registry import DATASETS

FILES = {'train': 'train_32x32.mat', 'test': 'test_32x32.mat', 'extra': 'extra_32x32.mat'}


@DATASETS.register_module(force=True)
class SVHN(BaseDataset):
    """Data set of SVHN's digits, 32 x 32 pixels, read from its MATLAB files; mmpretrain has none for it.

    Args:
        data_root: Folder of the files.
        split: ``'train'`` (73,257 images), ``'test'`` (26,032) or ``'extra'`` (531,131).
        **kwargs: Arguments of mmengine's ``BaseDataset``, such as ``pipeline``.

    Raises:
        ValueError: The split is unknown.
        FileNotFoundError: The file of the split is not in ``data_root``; nothing is downloaded.

    Source: Reading digits in natural images (Netzer et al., 2011), format 2.
    """

    METAINFO = {'classes': tuple('0123456789')}

    def __init__(self, data_root: str, split: str = 'train', **kwargs: Any) -> None:
        if split not in FILES:
            raise ValueError(f'split={split!r} must be one of {", ".join(FILES)}.')
        self.split = split
        super().__init__(data_root=data_root, **kwargs)

    def load_data_list(self) -> list[dict[str, Any]]:
        """Return each digit's image ``img`` ``(32, 32, 3)``, RGB, and its ``gt_label``; the files label zeros as 10."""
        from scipy.io import loadmat

        content = loadmat(str(Path(self.data_root) / FILES[self.split]))
        images = np.ascontiguousarray(content['X'].transpose(3, 0, 1, 2))
        labels = (content['y'].ravel() % 10).tolist()  # mmpretrain takes Python's integers alone
        return [dict(img=image, gt_label=label) for image, label in zip(images, labels, strict=True)]
