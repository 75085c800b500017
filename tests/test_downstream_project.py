"""A project of someone else, trained and tested from its own folder, beside the checkout and beside the wheel."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from helpers.environments import environment
from shapes import write_shapes


@pytest.fixture(scope='module')
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp('elsewhere') / 'downstream_project'
    shutil.copytree(ROOT / 'tests/downstream_project', folder)
    write_shapes(folder / 'data/shapes', num_train=4, num_val=2, size=64)
    return folder


@pytest.fixture(scope='module', params=['checkout', 'wheel'])
def python(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """This interpreter, or one of an environment with the released wheel and every package of this one but mmgate."""
    if request.param == 'checkout':
        return sys.executable
    folder = tmp_path_factory.mktemp('clean')
    dist = [sys.executable, str(ROOT / 'tools/dev/dist.py'), '--out', str(folder / 'dist')]
    subprocess.run(dist, check=True, capture_output=True)
    return environment(folder / 'env', *(folder / 'dist').glob('*.whl'))


def run(python: str, project: Path, *arguments: str) -> subprocess.CompletedProcess:
    # what was tested is on the path in the checkout's case alone
    others = os.environ.get('PYTHONPATH') if python == sys.executable else None
    return subprocess.run(
        [python, '-W', 'ignore', *arguments],
        cwd=project,
        env=dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, [str(project), others]))),
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.slow
def test_a_downstream_project_trains_and_tests(project: Path, python: str) -> None:
    config, work = 'configs/mine_r18_shapes.py', project / 'work'
    found = run(python, project, '-c', 'import mmgate, sys; print(mmgate.__file__, sys.prefix)').stdout.split()[-2:]
    assert (Path(found[0]).parents[1] == ROOT) == (python == sys.executable)
    assert python == sys.executable or found[0].startswith(found[1])
    training = run(python, project, '-m', 'mmgate.tools.train', config, '--work-dir', str(work))
    assert training.returncode == 0, training.stderr[-3000:]
    state = torch.load(work / 'epoch_1.pth', map_location='cpu', weights_only=False)['state_dict']
    assert {'neck.pooling.mix.weight', 'neck.pooling.gate.temperature.weight'} <= set(state)
    cross = 'decoder.layers.0.cross_attn'
    assert {f'{cross}.value_proj.weight', f'{cross}.gate.gml.weight'} <= set(state)
    testing = run(python, project, '-m', 'mmgate.tools.test', config, str(work / 'epoch_1.pth'))
    assert testing.returncode == 0, testing.stderr[-3000:]
    assert 'bbox_mAP' in testing.stdout + testing.stderr
