"""Tools find projects, which are beside their folder, whatever the working directory and wherever mmgate is."""

from __future__ import annotations

import runpy
import shutil
import sys
import sysconfig
from pathlib import Path

import pytest
from conftest import ROOT, run_python

from mmgate.deploy import export, runtime

CONFIG = """
custom_imports = dict(imports=['projects.NAME'], allow_failed_imports=False)
"""
SAYS = """
from mmgate.errors import ConfigError
raise ConfigError('the project is imported')
"""
FOLDERS = ('tools', 'tools/analysis_tools', 'tools/deploy', 'tools/model_converters')
WITHOUT_CONFIG = {'analysis_tools/benchmark_ops', 'analysis_tools/compare_runs', 'model_converters/agent_attention'}
# Command lines of the others, which read config.py.
ARGUMENTS = {
    'train': 'config.py',
    'test': 'config.py none.pth',
    'mm': 'print_config config.py',
    'analysis_tools/benchmark_training': '--ours config.py --device cpu',
    'analysis_tools/get_flops': 'config.py',
    'analysis_tools/list_attention': 'config.py',
    'analysis_tools/plot_efficiency': 'config.py --out out',
    'analysis_tools/study': 'study.py',
    'analysis_tools/try_gates': 'config.py --gate *=DGSA',
    'deploy/export': 'config.py none.pth',
    'deploy/test': 'config.py none.onnx',
    'model_converters/gates': 'extract config.py none.pth out',
}
PLOT = 'config.py none.pth --out out'
TOOLS = sorted(
    path.relative_to(ROOT / 'tools').with_suffix('').as_posix()
    for folder in FOLDERS
    for path in (ROOT / folder).glob('*.py')
)


@pytest.mark.parametrize('name', [name for name in TOOLS if name not in WITHOUT_CONFIG])
def test_each_tool_imports_projects(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in FOLDERS:
        (tmp_path / 'root' / folder).mkdir(parents=True)
    tool = tmp_path / f'root/tools/{name}.py'
    shutil.copy(ROOT / f'tools/{name}.py', tool)
    (tmp_path / 'root/projects').mkdir()
    (tmp_path / 'root/projects/imported_by_a_tool.py').write_text(SAYS)
    (tmp_path / 'config.py').write_text(CONFIG.replace('NAME', 'imported_by_a_tool'))
    (tmp_path / 'study.py').write_text("runs = {'one': 'config.py'}\nseeds = [0]\nmetric = 'mIoU'\n")
    # These two are looked at before the config.
    monkeypatch.setattr(export, 'check_environment', lambda: None)
    monkeypatch.setattr(runtime, 'Exported', lambda *given: None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, 'path', [*sys.path])
    monkeypatch.setattr(sys, 'argv', [str(tool), *ARGUMENTS.get(name, PLOT).split()])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(tool), run_name='__main__')
    assert end.value.code == 2 and 'the project is imported' in capsys.readouterr().err
    assert sys.path.index(str(tmp_path / 'root')) > sys.path.index(
        sysconfig.get_path('purelib')
    )  # what is installed goes first


def test_a_project_is_found_beside_a_wheel(tmp_path: Path) -> None:
    (tmp_path / 'config.py').write_text(CONFIG.replace('NAME', 'gated_lm'))
    (tmp_path / 'wheel').mkdir()
    (tmp_path / 'wheel/mmgate').symlink_to(ROOT / 'mmgate')
    paths = f'{tmp_path / "wheel"}:{sysconfig.get_path("purelib")}'
    # -S: site would read the file by which an editable install puts the root on the path
    stopped = run_python('-S', ROOT / 'tools/train.py', 'config.py', cwd=tmp_path, fails=True, PYTHONPATH=paths)
    assert "KeyError: 'model'" in stopped.stderr and 'custom modules' not in stopped.stderr
