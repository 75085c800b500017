"""Checkpoints of web addresses, in torch's cache."""

from __future__ import annotations

import os
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

    As in torch and mmengine, a file that is there under the address's name counts as downloaded.

    Raises:
        ConfigError: It cannot be downloaded, or not to its end.
    """
    path = urlparse(url).path
    # a cloud drive's address ends in a slash: the name is the folder's, which torch and mmengine take for no name
    name = PurePosixPath(path).name + ('.pth' if path.endswith('/') else '')
    file = Path(torch.hub.get_dir()) / 'checkpoints' / name
    if _local_rank() == 0:
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


def _local_rank() -> int:
    """Return this process's number on its machine, as launchers tell it; mmengine's needs a process group."""
    rank, _ = get_dist_info()
    told = (os.environ.get(name) for name in ('LOCAL_RANK', 'OMPI_COMM_WORLD_LOCAL_RANK'))
    return int(next((one for one in told if one is not None), rank))


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
