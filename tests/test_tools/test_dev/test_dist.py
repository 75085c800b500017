"""A release is whole, and a checkout that is installed as README says is found from any folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from conftest import ROOT, tool
from helpers.environments import environment

import mmgate


def test_the_package_its_metadata_and_the_changelog_name_one_version() -> None:
    declared = re.search(r'^version = "(.+)"$', (ROOT / 'pyproject.toml').read_text(), re.M)
    changes = re.search(r'^## (\S+)', (ROOT / 'CHANGELOG.md').read_text(), re.M)
    assert declared and changes
    assert declared[1] == mmgate.__version__
    assert changes[1] in (mmgate.__version__, 'Unreleased')


@pytest.mark.slow
def test_a_release_is_whole(tmp_path: Path) -> None:
    command = [sys.executable, '-W', 'ignore', str(ROOT / 'tools/dev/dist.py'), '--out', str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    with tarfile.open(next(tmp_path.glob('*.tar.gz'))) as archive:
        packed = {member.name.partition('/')[2] for member in archive.getmembers()}
    assert {'pyproject.toml', 'README.md', 'LICENSE', 'CHANGELOG.md', 'mmgate/.mim/tools/train.py'} <= packed
    assert not any(name.startswith('tests/') for name in packed)
    with zipfile.ZipFile(next(tmp_path.glob('*.whl'))) as wheel:
        assert any(name.endswith('licenses/LICENSE') or name.endswith('info/LICENSE') for name in wheel.namelist())


@pytest.mark.slow
def test_the_folder_of_a_clone_does_not_hide_the_package(tmp_path: Path) -> None:
    """It is called like the package, and the folder above is on the path by ``-m``, ``-c`` and ``PYTHONPATH=.``."""
    clone = tmp_path / 'mmgate'
    tool('trees', 'dev').copy_tree(clone)
    python = environment(tmp_path / 'env', '--no-build-isolation', '-e', clone)
    variables = {key: value for key, value in os.environ.items() if key != 'PYTHONPATH'}
    shown = 'from mmengine.config import Config; import mmgate; print(mmgate.__file__); Config.fromfile("mine.py")'
    config = 'mmgate::plug/deformable_detr/plug-deformable-detr-refine_r18_1xb8-12e_shapes.py'
    (tmp_path / 'mine.py').write_text(f"_base_ = '{config}'")
    for more, arguments, expected in (
        ({}, ['-c', shown], f'{clone}/mmgate/__init__.py'),
        ({}, ['-m', 'mmgate.tools.train', '--help'], '--amp'),
        ({'PYTHONPATH': '.'}, ['mmgate/tools/train.py', '--help'], '--amp'),
    ):
        done = subprocess.run(
            [python, '-W', 'ignore', *arguments], cwd=tmp_path, env=variables | more, capture_output=True, text=True
        )
        assert done.returncode == 0 and expected in done.stdout, done.stderr[-2000:]
