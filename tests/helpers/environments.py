"""Environments with every package of this one but mmgate, and a process that knows of no mm package."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

# At the start of a script: a finder that knows of no mm package.
HIDDEN = """
import importlib.machinery, sys

class Hidden(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition('.')[0] in ('mmengine', 'mmcv', 'mmdet', 'mmseg', 'mmpretrain', 'timm'):
            return None
        return super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = Hidden
"""


def environment(folder: Path, *install: str | Path) -> str:
    """Make an environment in which ``pip install`` had these arguments, without network; return its interpreter."""
    venv.create(folder, with_pip=False)
    python = str(folder / 'bin/python')
    (packages,) = folder.glob('lib/python*/site-packages')
    # an editable mmgate is known by a file of that folder, which is read of a site's own folders alone
    site = Path(sysconfig.get_paths()['purelib'])
    helpers = [path.read_text() for path in site.glob('torchvision_on_cpu.pth')]
    (packages / 'needed.pth').write_text('\n'.join([str(site), *helpers]))
    pip = [sys.executable, '-m', 'pip', '--disable-pip-version-check', '--python', python, 'install', '-q']
    # Else pip takes an mmgate that it finds by PYTHONPATH for this one.
    options = ['--ignore-installed', '--no-deps', '--no-index']
    subprocess.run([*pip, *options, *map(str, install)], check=True, capture_output=True)
    return python
