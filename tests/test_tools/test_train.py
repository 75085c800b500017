"""Tools find projects, which are beside their folder, whatever the working directory and wherever mmgate is."""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path

import pytest
from conftest import ROOT, run_python

CONFIG = """
custom_imports = dict(imports=['projects.gated_lm'], allow_failed_imports=False)
print(__import__('mmgate').__file__)
"""


@pytest.mark.parametrize(
    ('tool', 'said'), [('train.py', "KeyError: 'model'"), ('analysis_tools/get_flops.py', 'has no model')]
)
def test_a_tool_finds_projects_beside_it_behind_what_is_installed(tool: str, said: str, tmp_path: Path) -> None:
    (tmp_path / 'config.py').write_text(CONFIG)
    (tmp_path / 'wheel').mkdir()
    (tmp_path / 'wheel/mmgate').symlink_to(ROOT / 'mmgate')
    paths = f'{tmp_path / "wheel"}:{sysconfig.get_path("purelib")}'
    # -S: site would read the file by which an editable install puts the root on the path
    stopped = run_python('-S', ROOT / 'tools' / tool, 'config.py', cwd=tmp_path, fails=True, PYTHONPATH=paths)
    assert said in stopped.stderr and 'custom modules' not in stopped.stderr
    assert f'{tmp_path}/wheel/mmgate/__init__.py' in stopped.stdout


@pytest.mark.parametrize('folder', ['.', 'analysis_tools', 'deploy', 'model_converters'])
def test_every_tool_runs_as_that_one(folder: str) -> None:
    """By ``cli.main``, which finds projects and prints a mistake in one message."""
    ends = r'sys\.exit\((cli\.main\(main\)|run\(parser, main\)|main\(\))\)\n$'
    for path in (ROOT / 'tools' / folder).glob('*.py'):
        assert re.search(ends, path.read_text()), path
