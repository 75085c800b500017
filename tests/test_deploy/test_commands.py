"""What the tools of deployment refuse, before any work starts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from exported import exports

from mmgate.deploy import commands
from mmgate.deploy import export as exporting
from mmgate.deploy.capture import Captured
from mmgate.deploy.compare import NothingFound
from mmgate.deploy.export import check_format
from mmgate.deploy.runtime import Exported
from mmgate.engine.preflight import ConfigError


def test_an_old_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, '__version__', '2.1.2')
    with pytest.raises(ConfigError, match=r'needs torch 2\.9 or newer, this is 2\.1\.2: .* maintained forks'):
        commands.export(['no-config.py', 'no.pth'])


@exports
def test_the_plugin_is_onnxs() -> None:
    with pytest.raises(ConfigError, match='--msda plugin is a node of TensorRT, for --format onnx alone'):
        check_format('torch-export', 'plugin')


@pytest.mark.parametrize('name', ['missing.onnx', 'model.pth'])
def test_what_is_no_exported_file(name: str, tmp_path: Path) -> None:
    (tmp_path / 'model.pth').write_bytes(b'')
    reason = 'does not exist' if name == 'missing.onnx' else r'is no exported file: give an \.onnx or a \.pt2 file'
    with pytest.raises(ConfigError, match=reason):
        Exported(tmp_path / name)


@exports
@pytest.mark.parametrize(('problem', 'tries'), [(NothingFound('nothing'), 1), (ConfigError('it differs'), 2)])
def test_what_is_refused_leaves_the_file_that_was_there(
    problem: ConfigError, tries: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[bool] = []

    def write(model: object, batch: object, path: Path, *, fixed_size: bool, **_: object) -> Captured:
        path.write_bytes(b'refused')
        written.append(fixed_size)
        return Captured(None, 0 if fixed_size else 1, 65, (128, 128))

    def compared(*_: object) -> None:
        raise problem

    monkeypatch.setattr(exporting, 'write', write)
    monkeypatch.setattr(exporting, '_compared', compared)
    path = tmp_path / 'model.pt2'
    path.write_bytes(b'earlier')
    with pytest.raises(type(problem), match=str(problem)):
        exporting.export(torch.nn.Identity(), [{}], path, format='torch-export')
    assert written == [False, True][:tries]  # of one size only where the graph of any may be at fault
    assert path.read_bytes() == b'earlier' and list(tmp_path.iterdir()) == [path]
