"""A checkpoint for others: the weights and what the mm tools need beside them, under a name with their hash."""

from __future__ import annotations

import hashlib
import io
import os.path as osp
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlparse

import torch
from mmengine.runner.checkpoint import CheckpointLoader
from torch import Tensor

from mmgate.models.safetensors_file import safetensors_bytes

from .preflight import ConfigError, check_checkpoint
from .whole_checkpoints import WholeFileBackend

FORMATS = ('pth', 'safetensors')
ENDINGS = ('.pth', '.pt', '.safetensors')
OTHER_ENDINGS = ('.onnx', '.pt2', '.engine', '.bin', '.ckpt', '.h5', '.npz', '.pkl')
WEIGHTS = ('averaged', 'last')
VERSIONS = tuple(f'{package}_version' for package in ('mmengine', 'mmcv', 'mmdet', 'mmseg', 'mmpretrain'))
KEPT = ('cfg', 'config', 'dataset_meta', 'CLASSES', 'PALETTE', *VERSIONS)  # of meta
PLACES = ('state_dict', 'model')


def publish(source: str, out: str | None = None, *, form: str | None = None, weights: str | None = None) -> Path:
    """Write the weights of a checkpoint as ``NAME-HASH.pth`` or ``.safetensors``, whole or not at all.

    The hash is the first 8 digits of the file's SHA-256, as torch's hub checks it. Of ``meta`` the config, the classes,
    the palette and the packages' versions stay.

    Args:
        source: Checkpoint of mmengine, file or address; loaded without running code in it.
        out: File, to whose name the hash is added, or folder; None for beside the source.
        form: ``'pth'`` or ``'safetensors'``; None for what ``out`` ends with, or else ``'pth'``.
        weights: ``'averaged'`` (of an EMAHook) or ``'last'`` (those that it averaged); None for the averaged ones if
            there are any.

    Returns:
        The file that was written.

    Raises:
        ConfigError: The source cannot be read or holds no such weights, the file exists, or cannot be written.
    """
    if form is None:
        form = 'safetensors' if out and out.endswith('.safetensors') else 'pth'
    if out and out.endswith(OTHER_ENDINGS):
        raise ConfigError(f'{out}: a published checkpoint is a .pth or a .safetensors file.')
    check_checkpoint(source)
    checkpoint = CheckpointLoader.load_checkpoint(source, map_location='cpu', logger='silent')
    state, meta = chosen_weights(checkpoint, weights), _kept(checkpoint)
    try:
        content = safetensors_bytes(state, meta) if form == 'safetensors' else _pickled(state, meta)
    except (ImportError, ValueError) as error:
        raise ConfigError(f'{source}: {error}') from error
    path = _named(source, out)
    stem = path.stem if path.suffix in ENDINGS else path.name
    path = path.with_name(f'{stem}-{hashlib.sha256(content).hexdigest()[:8]}.{form}')
    if path.exists():
        raise ConfigError(f'{path} exists, and is left as it is.')
    WholeFileBackend().put(content, path)
    return path


def chosen_weights(checkpoint: Any, weights: str | None = None) -> dict[str, Tensor]:
    """Return the averaged or the last weights of a checkpoint, without what a wrapper added to their names.

    Args:
        checkpoint: Of mmengine (whose ``state_dict`` holds the averaged ones if an EMAHook ran) or timm, or tensors.
        weights: As :func:`publish` takes it.

    Raises:
        ConfigError: There are no such weights.
    """
    top: Mapping[str, Any] = checkpoint if isinstance(checkpoint, Mapping) else {}
    state = next((top[place] for place in PLACES if isinstance(top.get(place), Mapping)), top)
    averaged, last = top.get('state_dict_ema'), state
    if 'ema_state_dict' in top:
        swapped = {key[7:]: value for key, value in top['ema_state_dict'].items() if key.startswith('module.')}
        averaged, last = state, {**state, **swapped}
    if weights == 'averaged' and averaged is None:
        raise ConfigError('the checkpoint holds no averaged weights: it was trained without an EMAHook.')
    state = last if weights == 'last' or averaged is None else averaged
    strange = [key for key, value in state.items() if not isinstance(value, Tensor)]
    if strange or not state:
        raise ConfigError(
            f'the checkpoint holds no weights under {", ".join(PLACES)} or at its top: '
            f'{", ".join(map(str, strange[:5])) or "there is nothing"}.'
        )
    wrapped = all(key.startswith('module.') for key in state)
    return {key.removeprefix('module.') if wrapped else key: _own_memory(value) for key, value in state.items()}


def _own_memory(tensor: Tensor) -> Tensor:
    """Return a tensor that does not bring along the larger one of which it is a part."""
    tensor = tensor.detach()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _kept(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    given = checkpoint.get('meta') or {}
    meta = {key: given[key] for key in KEPT if key in given}
    runtime = (checkpoint.get('message_hub') or {}).get('runtime_info') or {}
    if 'cfg' not in meta and 'cfg' in runtime:
        meta['cfg'] = runtime['cfg']
    return meta


def _pickled(state: dict[str, Tensor], meta: dict[str, Any]) -> bytes:
    # into memory: in a file the folder inside the zip, and with it the hash, would follow the file's name
    with io.BytesIO() as file:
        torch.save(dict(meta=meta, state_dict=state), file)
        return file.getvalue()


def _named(source: str, out: str | None) -> Path:
    """Return the path without the hash."""
    name = PurePosixPath(urlparse(source).path if '://' in source else source).name
    if out is None:
        return Path(name if '://' in source else source)
    return Path(out, name) if osp.isdir(out) or out.endswith('/') else Path(out)
