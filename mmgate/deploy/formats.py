"""Check that files of a format can be written here, with the installed packages."""

from __future__ import annotations

import torch

from mmgate._environment import why_not
from mmgate.errors import ConfigError

SUFFIXES = {'onnx': '.onnx', 'torch-export': '.pt2'}
NEEDED = ('onnx', 'onnxscript', 'onnxruntime')
# First torch that can export whole detectors.
OLDEST = (2, 9)
# Largest number of images that a file takes, if it takes any number.
MAX_BATCH = 64


def check_format(format: str) -> None:
    """Raise ConfigError if files of this format cannot be written here.

    Raises:
        ConfigError: torch is too old, or a package is missing.
    """
    if tuple(int(part) for part in torch.__version__.split('.')[:2]) < OLDEST:
        raise ConfigError(
            f'exporting needs torch {OLDEST[0]}.{OLDEST[1]} or newer, this is {torch.__version__}: export from an '
            'environment of the maintained forks, which loads the same configs and checkpoints.'
        )
    missing = [name for name in NEEDED if why_not(name)] if format == 'onnx' else []
    if missing:
        raise ConfigError(f'--format onnx needs {", ".join(missing)}: pip install "mmgate[deploy]".')
