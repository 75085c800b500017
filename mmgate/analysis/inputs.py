"""Images and folders that a command line names, looked at before a model is built."""

from __future__ import annotations

import glob
import os.path as osp
import tempfile
from pathlib import Path

from mmgate.errors import ConfigError

IMAGES = ('.jpg', '.jpeg', '.png', '.ppm', '.bmp', '.pgm', '.tif', '.tiff', '.webp')


def check_folder(folder: Path) -> None:
    """Make a folder, and refuse one that nothing can be written to.

    Raises:
        ConfigError: With the reason.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(f'nothing can be written to {folder}: {error}. Give another --out.') from error


def find_images(inputs: str) -> list[str]:
    """Return the images of a file, a URL, a folder or a pattern.

    Raises:
        ConfigError: There are none.
    """
    images = [inputs]
    if not osp.isfile(inputs) and '://' not in inputs:
        found = glob.glob(osp.join(inputs, '*') if osp.isdir(inputs) else inputs)
        images = sorted(path for path in found if path.lower().endswith(IMAGES))
    if not images:
        raise ConfigError(f'{inputs} is no image, no folder with images ({" ".join(IMAGES)}) and no pattern of any.')
    return images
