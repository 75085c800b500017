"""What the tools of deployment refuse, before any work starts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from exported import exports

from mmgate.deploy import commands
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
