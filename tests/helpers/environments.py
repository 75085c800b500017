"""Environments with every package of this one but mmgate, to install it into."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path


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
