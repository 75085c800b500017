"""Checkpoints of web addresses, in torch's cache."""

from __future__ import annotations

import hashlib
import zipfile
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path, PurePosixPath
from urllib.parse import urlparse

import torch
from mmengine.dist import barrier, get_dist_info

from mmgate.errors import ConfigError


def download(url: str) -> Path:
    """Return the file in torch's cache that holds ``url``, downloaded by one process of a machine if need be.

    A file that was put there under the address's name counts as downloaded. Where it is known to be of another address
    with the same name, a file beside it is used.

    Raises:
        ConfigError: It cannot be downloaded, or not to its end.
    """
    file = _cached(url)
    if get_dist_info()[0] == 0:
        with suppress(OSError, HTTPException):  # raised below, once the others wait no more
            _fetch(url, file)
    barrier()
    try:
        _fetch(url, file)
    except (OSError, HTTPException) as error:
        raise ConfigError(
            f'checkpoint {url} cannot be downloaded ({error}). Download it in another way and give the file, in '
            'init_cfg.checkpoint or load_from.'
        ) from error
    return file


def _fetch(url: str, file: Path) -> None:
    if file.is_file():
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.hub.download_url_to_file(url, str(file), progress=get_dist_info()[0] == 0)
    with file.open('rb') as opened:
        ends_early = opened.read(2) == b'PK' and not zipfile.is_zipfile(file)  # torch takes what a server sends
    if ends_early:
        file.unlink()
        raise OSError('it ended early')
    _origin(file).write_text(_address(url))


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
