"""What the tools of deployment refuse, before any work starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import tool
from helpers.exported import exports

from mmgate.errors import ConfigError


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


def test_a_file_is_looked_for_before_its_config() -> None:
    with pytest.raises(ConfigError, match=r'exported file missing\.onnx does not exist'):
        tool('test', 'deploy').main(['no-config.py', 'missing.onnx', '--runtime', 'openvino'])
