"""Checkpoints from a web address: once, and whole."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from mmengine.runner.checkpoint import CheckpointLoader

import mmgate  # noqa: F401
from mmgate.checkpoints import download
from mmgate.checkpoints.loading import guarded_loaders
from mmgate.checkpoints.tensors import read_checkpoint
from mmgate.errors import ConfigError


class _Drive(http.server.BaseHTTPRequestHandler):
    """A cloud drive: addresses that end in a slash, one of a file, one of a page."""

    content = b''

    def do_GET(self) -> None:
        self.send_response(200 if self.path.startswith(('/f/', '/page/')) else 404)
        self.end_headers()
        if self.path.startswith('/f/'):
            self.wfile.write(self.content)
        elif self.path.startswith('/page/'):
            self.wfile.write(b'<!DOCTYPE html>')

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    torch.save({'model': {'weight': torch.ones(3)}}, tmp_path / 'served.pth')
    monkeypatch.setattr(_Drive, 'content', (tmp_path / 'served.pth').read_bytes())
    monkeypatch.setenv('no_proxy', '*')
    monkeypatch.setattr(torch.hub, 'get_dir', lambda: str(tmp_path / 'hub'))
    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), _Drive)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f'http://127.0.0.1:{server.server_port}'
    server.shutdown()
    server.server_close()


def test_downloads_from_a_cloud_drive_once(drive: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f'{drive}/f/13fdf0e0a7c5498c934f/?dl=1'
    assert read_checkpoint(url)['model']['weight'].sum() == 3
    assert (tmp_path / 'hub/checkpoints/13fdf0e0a7c5498c934f.pth').is_file()
    monkeypatch.setattr(_Drive, 'content', b'changed')
    assert read_checkpoint(url)['model']['weight'].sum() == 3


def test_a_download_that_ends_early_is_not_kept(drive: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = _Drive.content
    monkeypatch.setattr(_Drive, 'content', whole[:-100])
    with pytest.raises(ConfigError, match='ended early'):
        read_checkpoint(f'{drive}/f/model.pth')
    monkeypatch.setattr(_Drive, 'content', whole)
    assert read_checkpoint(f'{drive}/f/model.pth')['model']['weight'].sum() == 3


LOCAL, OPEN_MPI = 'LOCAL_RANK', 'OMPI_COMM_WORLD_LOCAL_RANK'


@pytest.mark.parametrize(
    'rank, told, downloads',
    [(0, {}, True), (1, {}, False), (1, {LOCAL: '1'}, False), (2, {LOCAL: '0'}, True), (2, {OPEN_MPI: '0'}, True)],
    ids=['first', 'second', 'second of a machine', 'first of another machine', 'by Open MPI'],
)
def test_the_first_process_of_a_machine_downloads_while_the_others_wait(
    rank: int, told: dict[str, str], downloads: bool, drive: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (LOCAL, OPEN_MPI):
        monkeypatch.delenv(name, raising=False)
    for name, number in told.items():
        monkeypatch.setenv(name, number)
    there: list[bool] = []
    monkeypatch.setattr(download, 'get_dist_info', lambda: (rank, 4))
    monkeypatch.setattr(download, 'barrier', lambda: there.append((tmp_path / 'hub/checkpoints/model.pth').is_file()))
    assert read_checkpoint(f'{drive}/f/model.pth')['model']['weight'].sum() == 3
    assert there == [downloads]


def test_one_message_for_a_checkpoint_that_cannot_be_had(drive: str) -> None:
    with pytest.raises(FileNotFoundError, match=r'agent\.pth is no file'):
        read_checkpoint('agent.pth')
    for load in (read_checkpoint, guarded_loaders()(CheckpointLoader.load_checkpoint)):
        with pytest.raises(ConfigError, match=r'/gone/ cannot be downloaded \(HTTP Error 404.*init_cfg\.checkpoint'):
            load(f'{drive}/gone/')
    with pytest.raises(ValueError, match='cannot be read .*web page'):
        read_checkpoint(f'{drive}/page/')
