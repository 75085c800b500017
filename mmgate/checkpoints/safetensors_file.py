"""Read files in the safetensors format."""

from __future__ import annotations

import os

from torch import Tensor

from mmgate._environment import why_not
from mmgate.errors import ConfigError


def check_safetensors() -> None:
    """Raise ConfigError if safetensors cannot be imported; what writes such files later asks for it at its start."""
    problem = why_not('safetensors')
    if problem:
        raise ConfigError(f'{problem}. Gates files need it; type: pip install safetensors')


def read_safetensors(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read a ``.safetensors`` file; return its tensors on the CPU, and its metadata.

    Raises:
        ValueError: The file cannot be read; the message is the reason.
        ConfigError: safetensors is not installed.
    """
    check_safetensors()
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(os.fspath(path), framework='pt') as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ValueError(str(error)) from error
