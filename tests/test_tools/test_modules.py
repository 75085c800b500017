"""The tools where no checkout is at hand: ``python -m``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize('tool', ['train', 'test', 'mm', 'image_demo'])
def test_runs_as_a_module(tool: str, tmp_path: Path) -> None:
    command = [sys.executable, '-W', 'ignore', '-m', f'mmgate.tools.{tool}', '--help']
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr[-2000:]
    assert 'config' in result.stdout
