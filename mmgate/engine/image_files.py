"""Image files that a command line names."""

from __future__ import annotations

import glob
import os.path as osp

from mmengine.fileio import list_dir_or_file

from .preflight import ConfigError

IMAGES = ('.jpg', '.jpeg', '.png', '.ppm', '.bmp', '.pgm', '.tif', '.tiff', '.webp')


def find_images(inputs: str) -> list[str]:
    """Return the images of a file, a URL, a folder or a pattern.

    Raises:
        ConfigError: There are none.
    """
    if osp.isdir(inputs):
        images = sorted(osp.join(inputs, name) for name in list_dir_or_file(inputs, list_dir=False, suffix=IMAGES))
    elif '://' in inputs or osp.isfile(inputs):
        images = [inputs]
    else:
        images = sorted(path for path in glob.glob(inputs) if path.lower().endswith(IMAGES))
    if not images:
        raise ConfigError(f'{inputs} is no image, no folder with images ({" ".join(IMAGES)}) and no pattern of any.')
    return images
