"""Checkpoints in the safetensors format: weights, and mmengine's ``meta`` if it is JSON in the file's metadata."""

from __future__ import annotations

import json
import os
from typing import Any

KEY = 'meta'  # of the JSON in the metadata


def read_safetensors(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return ``dict(state_dict=..., meta=...)`` of a file, on the CPU; ``meta`` is empty if the file has none.

    Raises:
        ValueError: The file cannot be read; the message is the reason.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(os.fspath(path), framework='pt') as file:
            state = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            meta = json.loads((file.metadata() or {}).get(KEY, '{}'))
    except (SafetensorError, OSError, RecursionError, ValueError) as error:
        raise ValueError(str(error)) from error
    if not isinstance(meta, dict):
        raise ValueError(f'its metadata {KEY} is no dictionary')
    _restore_tuples(meta)
    return dict(state_dict=state, meta=meta)


def _restore_tuples(meta: dict[str, Any]) -> None:
    """Give classes and palettes back as mm's data sets have them, since JSON knows lists alone: visualizers ask."""
    for owner in (meta, meta.get('dataset_meta')):
        if isinstance(owner, dict):
            for key, value in owner.items():
                if key.lower() == 'classes' and isinstance(value, list):
                    owner[key] = tuple(value)
                elif key.lower() == 'palette' and isinstance(value, list):
                    owner[key] = [tuple(color) if isinstance(color, list) else color for color in value]
