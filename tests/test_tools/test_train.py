"""tools/train.py and tools/test.py find projects beside an mmgate of a wheel, which leaves the root off the path."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest
from conftest import ROOT, run_python

CONFIG = """
custom_imports = dict(imports=['projects.gated_lm'], allow_failed_imports=False)
"""


@pytest.mark.parametrize('name, said', [('train', "KeyError: 'model'"), ('test', 'none.pth does not exist')])
def test_a_config_of_any_folder_imports_a_project(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / 'config.py').write_text(CONFIG)
    (tmp_path / 'wheel').mkdir()
    (tmp_path / 'wheel/mmgate').symlink_to(ROOT / 'mmgate')
    paths = f'{tmp_path / "wheel"}:{sysconfig.get_path("purelib")}'
    # -S: site would read the file by which an editable install puts the root on the path
    arguments = ['-S', ROOT / f'tools/{name}.py', 'config.py', *['none.pth'] * (name == 'test')]
    stopped = run_python(*arguments, cwd=tmp_path, fails=True, PYTHONPATH=paths)
    assert said in stopped.stderr and 'custom modules' not in stopped.stderr
