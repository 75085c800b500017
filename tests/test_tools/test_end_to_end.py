"""The tools on a tiny run, and the shell scripts around them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT, run_python
from helpers.small_demo import CONFIG
from shapes import write_shapes

from mmgate.mm import cli


@pytest.fixture(scope='module')
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A foreign folder with data and a config of an epoch."""
    folder = tmp_path_factory.mktemp('project')
    write_shapes(folder / 'data/shapes', num_train=4, num_val=2, size=64)
    (folder / 'short.py').write_text(CONFIG.replace('EPOCHS', '1'))
    return folder


def test_train_then_test_with_all_outputs(
    project: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Trained as a user does, in a process; the script of the test is run in one by others."""
    run_python(ROOT / 'tools/train.py', 'short.py', '--auto-scale-lr', cwd=project)
    monkeypatch.chdir(project)
    work = Path('work_dirs/short')
    outputs = ['--work-dir', f'{work}/test', '--out', f'{work}/out.pkl', '--show-dir', 'painted', '--tta']
    named = ['--cfg-options', 'experiment_name=end_to_end', 'visualizer.name=end_to_end']
    assert cli.main(cli.test, ['short.py', f'{work}/epoch_1.pth', *outputs, *named]) == 0
    printed = ''.join(capfd.readouterr())
    assert 'coco/bbox_mAP_50' in printed
    assert (work / 'out.pkl').stat().st_size > 0
    assert len(list((work / 'test').rglob('painted/*.jpg'))) == 2


@pytest.mark.parametrize(
    'script, arguments, expected',
    [
        ('dist_train.sh', ['c.py', '8', '--amp'], '--nproc_per_node=8 TOOLS/train.py c.py --launcher pytorch --amp'),
        ('dist_test.sh', ['c.py', 'x.pth', '2'], '--nproc_per_node=2 TOOLS/test.py c.py x.pth --launcher pytorch'),
        (
            'slurm_train.sh',
            ['p', 'j', 'c.py', 'w d', '--amp'],
            'TOOLS/train.py c.py --work-dir=w d --launcher slurm --amp',
        ),
        ('slurm_test.sh', ['p', 'j', 'c.py', 'x.pth'], '--partition=p --job-name=j TOOLS/test.py c.py x.pth'),
    ],
)
def test_shell_scripts_launch(tmp_path: Path, script: str, arguments: list[str], expected: str) -> None:
    """With a launcher that prints its arguments."""
    for launcher in ('torchrun', 'srun'):
        (tmp_path / launcher).write_text('#!/bin/sh\necho "$@"\n')
        (tmp_path / launcher).chmod(0o755)
    environment = {**os.environ, 'PATH': f'{tmp_path}:{os.environ["PATH"]}'}
    path = str(ROOT / 'tools' / script)
    assert os.access(path, os.X_OK)
    printed = subprocess.run(
        ['bash', path, *arguments], env=environment, capture_output=True, text=True, check=True
    ).stdout
    for part in expected.replace('TOOLS', str(ROOT / 'tools')).split(' '):
        assert part in printed.split(), printed
