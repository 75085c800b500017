"""What the tools of deployment refuse, before any work starts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from exported import exports

from mmgate.benchmarks import deployment
from mmgate.deploy import commands
from mmgate.deploy import export as exporting
from mmgate.deploy.capture import Captured
from mmgate.deploy.export import check_format
from mmgate.deploy.runtime import Exported
from mmgate.errors import ConfigError


def test_an_old_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, '__version__', '2.1.2')
    with pytest.raises(ConfigError, match=r'needs torch 2\.9 or newer, this is 2\.1\.2: .* maintained forks'):
        commands.export(['no-config.py', 'no.pth'])


@exports
def test_the_plugin_is_onnxs() -> None:
    with pytest.raises(ConfigError, match='--msda plugin is a node of TensorRT, for --format onnx alone'):
        check_format('torch-export', 'plugin')


@pytest.mark.parametrize(
    ('name', 'trusted', 'reason'),
    [
        ('missing.onnx', False, 'does not exist'),
        ('model.pth', False, r'is no exported file: give an \.onnx or a \.pt2 file'),
        ('model.pt2', False, 'may hold code, which opening it would run.*--trust-checkpoint'),
        ('model.pt2', True, 'cannot be read as a program of torch'),
        ('checkpoint.pt2', True, "cannot be read as a program of torch: 'it is a zip file of another kind'"),
    ],
)
def test_what_is_no_exported_file(name: str, trusted: bool, reason: str, tmp_path: Path) -> None:
    for empty in ('model.pth', 'model.pt2'):
        (tmp_path / empty).write_bytes(b'')
    torch.save({}, tmp_path / 'checkpoint.pt2')
    with pytest.raises(ConfigError, match=reason):
        Exported(tmp_path / name, trusted=trusted)


@pytest.mark.parametrize('size', [(7, 9), (8, 7)], ids=str)
def test_images_of_a_size_that_the_graph_does_not_take(size: tuple[int, int]) -> None:
    run = object.__new__(Exported)
    run.path, run.notes = Path('model.onnx'), dict(divisor=1, least=8, takes='any sides from 8 on')
    run._run = lambda inputs: inputs
    with pytest.raises(ConfigError, match=f'takes any sides from 8 on, this batch has {size[0]} x {size[1]}'):
        run(torch.zeros(1, 3, *size), torch.tensor([size]))
    run(torch.zeros(1, 3, 8, 9), torch.tensor([[8, 9]]))


@exports
def test_results_are_not_measured_before_they_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deployment, 'load_with_images', lambda *_, **__: pytest.fail('too late'))
    with pytest.raises(ConfigError, match='is a folder'):
        deployment.benchmark(['no.py', 'no.pth', '--out', str(tmp_path)])


@pytest.mark.parametrize('out', ['/proc/a.onnx', 'file/a.onnx', 'folder.onnx'])
def test_what_cannot_be_written(out: str, tmp_path: Path) -> None:
    (tmp_path / 'file').write_text('')
    (tmp_path / 'folder.onnx').mkdir()
    with pytest.raises(ConfigError, match=r'nothing can be written to (/proc|.*/file)|is a folder'):
        exporting.check_writable(tmp_path / out)


@exports
def test_what_is_refused_leaves_the_file_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[bool] = []

    def write(model: object, batches: object, path: Path, *, fixed_size: bool, **_: object) -> Captured:
        path.write_bytes(b'refused')
        written.append(fixed_size)
        return Captured(None, 0 if fixed_size else 1, 65, (128, 128))

    def compared(*_: object) -> None:
        raise ConfigError('it differs')

    monkeypatch.setattr(exporting, 'check_finds_something', lambda *_: None)
    monkeypatch.setattr(exporting, 'write', write)
    monkeypatch.setattr(exporting, '_compared', compared)
    path = tmp_path / 'model.pt2'
    path.write_bytes(b'earlier')
    with pytest.raises(ConfigError, match='it differs'):
        exporting.export(torch.nn.Identity(), [{}], path, format='torch-export')
    assert written == [False, True]  # of one size where the graph of any may be at fault
    assert path.read_bytes() == b'earlier' and list(tmp_path.iterdir()) == [path]
