"""The tensors in a checkpoint file, local or published, and nothing else of it."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlparse

import torch
from mmengine.dist import barrier, get_dist_info
from mmengine.logging import print_log
from mmengine.runner.checkpoint import CheckpointLoader
from torch import Tensor

from .guarded_pickle import GuardedUnpickler, UnsafeCheckpoint, load_pickled
from .safetensors_file import read_safetensors

State = dict[str, Tensor]
# the averaged weights first: those are what CSwin's authors, with agents and without, start from and evaluate
PLACES = ('state_dict_ema', 'state_dict', 'model')
TO_DO = 'point init_cfg.checkpoint at a file that you have, or start from scratch with init_cfg=None'


class _Unread:
    """In the place of every object that is neither a tensor nor a plain container; it takes what pickle gives it."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    __setstate__ = __setitem__ = append = extend = add = __init__

    def __call__(self, *_: Any, **__: Any) -> _Unread:
        return self


class _TensorUnpickler(GuardedUnpickler):
    def find_other(self, module: str, name: str) -> Any:
        return _Unread


def read_checkpoint(source: str) -> Any:
    """Return what the checkpoint at a path or URL holds, with its tensors on the CPU.

    Training scripts pickle their whole configuration beside the weights (the published agent attention does, as a class
    of a package that need not be installed). Only tensors, numbers, strings and plain containers are loaded; any other
    object is left empty, and no code of the file runs. A web address is downloaded once into torch's cache; mmengine
    reads other schemes (``torchvision://``, ``s3://``, ...) in its own way.

    Args:
        source: Path, or address with a scheme.

    Raises:
        FileNotFoundError: There is no such file.
        ConnectionError: It cannot be downloaded.
        ImportError: It is a ``.safetensors`` file, and safetensors is not installed.
        ValueError: It is no checkpoint, cut short, or made to run code or to fill the memory.
    """
    scheme = urlparse(source).scheme if '://' in source else ''
    if scheme in ('http', 'https'):
        file = download(source)
    elif scheme:
        return CheckpointLoader.load_checkpoint(source, map_location='cpu', logger='current')
    else:
        file = Path(source).expanduser()
    if not file.is_file():
        what = 'is a folder' if file.is_dir() else f'does not exist (looked for {file.absolute()})'
        raise FileNotFoundError(f'checkpoint {source} {what}; {TO_DO}.')
    try:
        if file.suffix == '.safetensors':
            return read_safetensors(file)
        return load_pickled(file, _TensorUnpickler, map_location='cpu')
    except UnsafeCheckpoint as error:
        raise ValueError(f'{file} {error}, which no checkpoint of a training does; it was not loaded.') from error
    except ValueError as error:
        raise ValueError(
            f'{file} cannot be read as a torch checkpoint ({error}); it may be cut short, or a web page that was '
            f'saved in its place. Delete it and download {source} again, or {TO_DO}.'
        ) from error


def tensors(checkpoint: Any) -> State:
    """Return the tensors of a checkpoint, under one of ``PLACES`` or at its top; of a detector, its backbone's.

    Raises:
        ValueError: There are no tensors where they are expected.
    """
    top: Mapping[str, Any] = checkpoint if isinstance(checkpoint, Mapping) else {}
    places = [place for place in PLACES if top.get(place)]
    if len(places) > 1:
        print_log(f'The checkpoint holds {", ".join(places)}: reading {places[0]}', logger='current')
    state = top[places[0]] if places else top
    if not isinstance(state, Mapping) or not any(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(
            f'The checkpoint holds no tensors under {", ".join(PLACES)} or at its top; '
            f'its keys are {", ".join(map(str, list(top)[:8])) or "none"}.'
        )
    state = {key.removeprefix('module.'): value for key, value in state.items()}
    if any(key.startswith('backbone.') for key in state):
        state = {key.removeprefix('backbone.'): value for key, value in state.items() if key.startswith('backbone.')}
    return state


def download(url: str) -> Path:
    """Return the file in torch's cache that holds ``url``, downloaded by one process of a machine if need be.

    A file that was put there under the address's name counts as downloaded. Where it is known to be of another address
    with the same name, a file beside it is used.

    Raises:
        ConnectionError: It cannot be downloaded, or not to its end.
    """
    file = _cached(url)

    def fetch() -> None:
        if not file.is_file():
            file.parent.mkdir(parents=True, exist_ok=True)
            torch.hub.download_url_to_file(url, str(file), progress=get_dist_info()[0] == 0)
            if _ends_early(file):
                file.unlink()
                raise OSError('it ended early')
            _origin(file).write_text(_address(url))

    if get_dist_info()[0] == 0:
        with suppress(OSError, HTTPException):  # raised below, once the others wait no more
            fetch()
    barrier()
    try:
        fetch()
    except (OSError, HTTPException) as error:
        raise ConnectionError(
            f'{url} cannot be downloaded ({error}). Download it in another way and {TO_DO}.'
        ) from error
    return file


def _cached(url: str) -> Path:
    path = urlparse(url).path
    # a cloud drive's address ends in a slash: the name is the folder's, which torch and mmengine take for no name
    name = PurePosixPath(path).name + ('.pth' if path.endswith('/') else '')
    file = Path(torch.hub.get_dir()) / 'checkpoints' / name
    origin = _origin(file)
    if file.is_file() and origin.is_file() and origin.read_text() != _address(url):
        return file.with_name(f'{file.stem}-{_address(url)[:8]}{file.suffix}')
    return file


def _address(url: str) -> str:
    """Return a hash of what tells addresses apart: of a file's name not the query, which may be a signature."""
    parts = urlparse(url)
    query = '' if PurePosixPath(parts.path).suffix else parts.query
    return hashlib.sha256(f'{parts.hostname}:{parts.port}{parts.path}?{query}'.encode()).hexdigest()


def _origin(file: Path) -> Path:
    """Return where the hash of a downloaded file's address is noted."""
    return file.with_name(f'{file.name}.address')


def _ends_early(file: Path) -> bool:
    """Return whether a file begins as torch's zip does and does not end as one; torch takes what a server sends."""
    with file.open('rb') as opened:
        return opened.read(2) == b'PK' and not zipfile.is_zipfile(file)
