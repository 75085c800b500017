"""A project of someone else, trained and tested from its own folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT

from mmgate.datasets.shapes import write_shapes


@pytest.fixture(scope='module')
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp('elsewhere') / 'downstream_project'
    shutil.copytree(ROOT / 'tests/downstream_project', folder)
    write_shapes(folder / 'data/shapes', num_train=4, num_val=2, size=64)
    return folder


def run(project: Path, tool: str, *arguments: str) -> subprocess.CompletedProcess:
    paths = [str(project), *filter(None, [os.environ.get('PYTHONPATH')])]
    return subprocess.run(
        [sys.executable, '-W', 'ignore', '-m', f'mmgate.tools.{tool}', *arguments],
        cwd=project,
        env=dict(os.environ, PYTHONPATH=os.pathsep.join(paths)),
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.slow
def test_train_and_test(project: Path) -> None:
    config, work = 'configs/mine_r18_shapes.py', project / 'work'
    training = run(project, 'train', config, '--work-dir', str(work))
    assert training.returncode == 0, training.stderr[-3000:]
    state = torch.load(work / 'epoch_1.pth', map_location='cpu', weights_only=False)['state_dict']
    assert {'neck.pooling.mix.weight', 'neck.pooling.temperature.weight'} <= set(state)
    assert 'decoder.layers.0.cross_attn.gml.weight' in state
    testing = run(project, 'test', config, str(work / 'epoch_1.pth'))
    assert testing.returncode == 0, testing.stderr[-3000:]
    assert 'bbox_mAP' in testing.stdout + testing.stderr


@pytest.mark.slow
def test_a_wrong_option_of_its_gate_is_named(project: Path) -> None:
    result = run(project, 'train', 'configs/mine_r18_shapes.py', '--cfg-options', 'model.attention.0.strenght=1')
    assert result.returncode != 0
    assert 'mine.gate.Tempered has no option strenght; it has' in result.stderr and 'Traceback' not in result.stderr
