"""A release is whole."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from conftest import ROOT


@pytest.mark.slow
def test_a_release_is_whole(tmp_path: Path) -> None:
    command = [sys.executable, '-W', 'ignore', str(ROOT / 'tools/dev/dist.py'), '--out', str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    with tarfile.open(next(tmp_path.glob('*.tar.gz'))) as archive:
        packed = {member.name.partition('/')[2] for member in archive.getmembers()}
    assert {'pyproject.toml', 'README.md', 'LICENSE', 'CHANGELOG.md', 'mmgate/.mim/tools/train.py'} <= packed
    assert not any(name.startswith('tests/') for name in packed)
    configs = {str(path.relative_to(ROOT)) for path in (ROOT / 'configs').rglob('*.py')}
    with zipfile.ZipFile(next(tmp_path.glob('*.whl'))) as wheel:
        assert configs <= {name.removeprefix('mmgate/.mim/') for name in wheel.namelist()}
        assert configs <= {name.removeprefix('mmgate/.mim/') for name in packed}
        assert any(name.endswith('licenses/LICENSE') or name.endswith('info/LICENSE') for name in wheel.namelist())
