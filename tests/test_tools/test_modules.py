"""The tools where no checkout is at hand: ``python -m``."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize('tool', ['test', 'mm', 'image_demo'])
def test_runs_as_a_module(tool: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, 'argv', [tool, '--help'])
    with pytest.raises(SystemExit) as exit:
        runpy.run_module(f'mmgate.tools.{tool}', run_name='__main__')
    assert exit.value.code == 0 and 'config' in capsys.readouterr().out


def test_runs_in_a_process_of_its_own(tmp_path: Path) -> None:
    command = [sys.executable, '-W', 'ignore', '-m', 'mmgate.tools.train', '--help']
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr[-2000:]
    assert 'config' in result.stdout
