"""Download checkpoints into torch's cache."""

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
    """Return the path of a URL's file in torch's cache; if it is missing, one process per machine downloads it.

    As in torch and mmengine, a file of the address's name counts as downloaded.

    Raises:
        ConfigError: The download fails or ends early.
    """
    path = urlparse(url).path
    # The address of a cloud drive ends in a slash. Its file gets the folder's name; torch and mmengine would find none.
    name = PurePosixPath(path).name + ('.pth' if path.endswith('/') else '')
    file = Path(torch.hub.get_dir()) / 'checkpoints' / name
    if _local_rank() == 0:
        # An error is raised below, when the other processes no longer wait.
        with suppress(OSError, HTTPException):
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
    """Return this process's rank on its machine, from the environment variables that launchers set.

    mmengine's function needs a process group.
    """
    rank, _ = get_dist_info()
    for name in ('LOCAL_RANK', 'OMPI_COMM_WORLD_LOCAL_RANK'):
        if name in os.environ:
            return int(os.environ[name])
    return rank


def _fetch(url: str, file: Path) -> None:
    if file.is_file():
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.hub.download_url_to_file(url, str(file), progress=get_dist_info()[0] == 0)
    with file.open('rb') as opened:
        # torch does not check that a server has sent the whole file.
        ends_early = opened.read(2) == b'PK' and not zipfile.is_zipfile(file)
    if ends_early:
        file.unlink()
        raise OSError('it ended early')
