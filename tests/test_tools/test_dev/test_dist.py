"""A release: the same bytes twice, whole, and with its bill of materials."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tarfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
from conftest import ROOT

HAS_BOM = find_spec('cyclonedx_py') is not None


def build(out: Path, umask: int, *options: str) -> dict[str, bytes]:
    """Build as somebody does whose new files have other rights, in another folder for temporary files."""
    (out / 'tmp').mkdir(parents=True)
    environment = dict(os.environ, TMPDIR=str(out / 'tmp'), SOURCE_DATE_EPOCH='1700000000')
    command = [sys.executable, '-W', 'ignore', str(ROOT / 'tools/dev/dist.py'), '--out', str(out / 'dist'), *options]
    subprocess.run(command, env=environment, umask=umask, check=True, capture_output=True, timeout=300)
    return {path.name: path.read_bytes() for path in (out / 'dist').iterdir()}


@pytest.mark.slow
def test_a_release_is_reproducible_and_whole(tmp_path: Path) -> None:
    built = build(tmp_path / 'first', 0o022, *([] if HAS_BOM else ['--no-bom']))
    again = build(tmp_path / 'second', 0o077, '--no-bom')
    for suffix in ('.tar.gz', '.whl'):
        (name,) = (name for name in built if name.endswith(suffix))
        assert built[name] == again[name], name
        assert f'{hashlib.sha256(built[name]).hexdigest()}  {name}' in built['SHA256SUMS'].decode()

    dist = tmp_path / 'first/dist'
    with tarfile.open(next(dist.glob('*.tar.gz'))) as archive:
        members = archive.getmembers()
        packed = {member.name.partition('/')[2] for member in members}
    assert {member.mtime for member in members} == {1700000000} and {member.uid for member in members} == {0}
    assert {'pyproject.toml', 'README.md', 'LICENSE', 'CHANGELOG.md', 'mmgate/.mim/tools/train.py'} <= packed
    assert not any(name.startswith('tests/') for name in packed)
    configs = {str(path.relative_to(ROOT)) for path in (ROOT / 'configs').rglob('*.py')}
    with zipfile.ZipFile(next(dist.glob('*.whl'))) as wheel:
        assert configs <= {name.removeprefix('mmgate/.mim/') for name in wheel.namelist()}
        assert configs <= {name.removeprefix('mmgate/.mim/') for name in packed}
        assert any(name.endswith('licenses/LICENSE') or name.endswith('info/LICENSE') for name in wheel.namelist())

    if HAS_BOM:
        (bom,) = (json.loads(content) for name, content in built.items() if name.endswith('.cdx.json'))
        assert bom['bomFormat'] == 'CycloneDX' and bom['metadata']['component']['name'] == 'mmgate'
        listed = {component['name']: component.get('version') for component in bom['components']}
        assert listed['torch'] and {'onedl-mmengine', 'onedl-mmcv'} <= set(listed)
