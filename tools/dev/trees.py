"""Copies of the checkout, for commands that must not write into it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def copy_tree(target: Path, source: Path = ROOT) -> None:
    """Copy the files of ``source`` that git tracks or does not ignore; links stay links."""
    listed = ['git', 'ls-files', '-coz', '--exclude-standard']
    names = subprocess.run(listed, cwd=source, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split('\0')):
        if os.path.lexists(source / name):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source / name, target / name, follow_symlinks=False)
