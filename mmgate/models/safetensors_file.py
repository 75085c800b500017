"""Checkpoints in the safetensors format: weights, and as JSON in the file's metadata what the mm tools ask for."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

KEY = 'meta'  # of the JSON in the metadata


def read_safetensors(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return ``dict(state_dict=..., meta=...)`` of a file, on the CPU; ``meta`` is empty if it is not one of ours.

    Raises:
        ImportError: safetensors is not installed.
        ValueError: The file cannot be read; the message is the reason.
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ModuleNotFoundError as error:
        raise ImportError(f'{path} needs a package that is not installed: pip install safetensors.') from error
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


def safetensors_bytes(state: Mapping[str, Tensor], meta: Mapping[str, Any]) -> bytes:
    """Return the file's content. Tensors that share their memory are written once each.

    Args:
        state: Tensors by name.
        meta: Texts, numbers, lists, tuples, dictionaries and arrays.

    Raises:
        ImportError: safetensors is not installed.
        ValueError: ``meta`` holds what JSON cannot say.
    """
    try:
        from safetensors.torch import save
    except ModuleNotFoundError as error:
        raise ImportError('the safetensors format needs a package: pip install safetensors.') from error
    try:
        text = json.dumps(meta, default=_plain, sort_keys=True)
    except TypeError as error:
        raise ValueError(f'meta cannot be written as JSON: {error}') from error
    tensors = {key: value.detach().clone().contiguous() for key, value in state.items()}
    return _in_order(save(tensors, {'format': 'pt', KEY: text}))  # "format" is what other libraries look for


def _in_order(content: bytes) -> bytes:
    """Sort the metadata, whose order safetensors draws anew for every file: the same weights give the same bytes."""
    end = 8 + int.from_bytes(content[:8], 'little')  # of the header, as JSON behind its length
    header = json.loads(content[8:end])
    header['__metadata__'] = dict(sorted(header['__metadata__'].items()))
    text = json.dumps(header, separators=(',', ':'), ensure_ascii=False).encode()
    text += b' ' * (-len(text) % 8)  # tensors lie at multiples of 8
    return len(text).to_bytes(8, 'little') + text + content[end:]


def _plain(value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic, Tensor)):
        return value.tolist()
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    raise TypeError(f'{type(value).__name__} is neither text nor number')


def _restore_tuples(meta: dict[str, Any]) -> None:
    """Give classes and palettes back as mm's data sets have them, since JSON knows lists alone: visualizers ask."""
    for owner in (meta, meta.get('dataset_meta')):
        if isinstance(owner, dict):
            for key, value in owner.items():
                if key.lower() == 'classes' and isinstance(value, list):
                    owner[key] = tuple(value)
                elif key.lower() == 'palette' and isinstance(value, list):
                    owner[key] = [tuple(color) if isinstance(color, list) else color for color in value]
