"""What the tools of deployment refuse, before any work starts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import tool
from helpers.exported import exports

from mmgate.errors import ConfigError


def test_an_old_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, '__version__', '2.1.2')
    with pytest.raises(ConfigError, match=r'needs torch 2\.9 or newer, this is 2\.1\.2: .* maintained forks'):
        tool('export', 'deploy').main(['no-config.py', 'no.pth'])


@exports
@pytest.mark.parametrize(
    ('out', 'reason'),
    [
        ('file/a.onnx', 'nothing can be written to .*/file'),
        ('a.pt2', r'a\.pt2: an ONNX file ends with \.onnx'),
    ],
)
def test_what_cannot_be_written(out: str, reason: str, tmp_path: Path) -> None:
    pytest.importorskip('onnxruntime', reason='needs the extra "deploy"')
    (tmp_path / 'file').write_text('')
    with pytest.raises(ConfigError, match=reason):
        tool('export', 'deploy').main(['no-config.py', 'no.pth', '--out', str(tmp_path / out)])
