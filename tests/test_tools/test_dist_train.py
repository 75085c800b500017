"""dist_train.sh and dist_test.sh on a CPU: as one process, and on two nodes."""

from __future__ import annotations

import json
import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from helpers.small_demo import CONFIG, SEGMENTOR
from shapes import write_shapes
from torch import Tensor

pytestmark = pytest.mark.slow
NOTES = '''
import json

from mmengine.dist import get_rank
from mmengine.hooks import Hook
from mmengine.registry import HOOKS


@HOOKS.register_module()
class Losses(Hook):
    """Every process writes its losses, before the mean that a log has none of."""

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        losses = {key: float(value) for key, value in outputs.items() if 'loss' in key}
        with open(f'{runner.work_dir}/losses_{get_rank()}', 'a') as file:
            file.write(json.dumps(losses) + '\\n')
'''
# the demo's model, smaller, without what differs from process to process
DETECTOR = f"""{CONFIG.replace('EPOCHS', '1')}
custom_imports = dict(imports=['mmgate', 'notes'])
custom_hooks = [dict(type='Losses')]
train_pipeline = [
    dict(type='LoadImageFromFile'), dict(type='LoadAnnotations', with_bbox=True), dict(type='PackDetInputs')]
train_dataloader.update(batch_size=8, dataset=dict(pipeline=train_pipeline))
test_dataloader.update(batch_size=1)
model.update(encoder=dict(num_layers=1, layer_cfg=dict(self_attn_cfg=dict(dropout=0.0))))
model['decoder'] = dict(
    num_layers=1, layer_cfg=dict(self_attn_cfg=dict(dropout=0.0), cross_attn_cfg=dict(dropout=0.0)))
randomness = dict(seed=2)
"""


@pytest.fixture(scope='module')
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp('dist')
    write_shapes(folder / 'data/shapes', num_train=64, num_val=5, size=64)
    (folder / 'notes.py').write_text(NOTES)
    (folder / 'detector.py').write_text(DETECTOR)
    (folder / 'segmentor.py').write_text(SEGMENTOR)
    return folder


def environment(folder: Path, **more: str) -> dict[str, str]:
    scripts = f'{Path(sys.executable).parent}:{os.environ["PATH"]}'
    settings = dict(PYTHONPATH=f'{ROOT}:{folder}', PATH=scripts, OMP_NUM_THREADS='1', CUDA_VISIBLE_DEVICES='')
    return {**os.environ, **settings, 'PYTHONWARNINGS': 'ignore', 'PORT': str(free_port()), **more}


def free_port() -> int:
    with socket.socket() as server:
        server.bind(('127.0.0.1', 0))
        return server.getsockname()[1]


def start(folder: Path, *command: str, **more: str) -> subprocess.Popen:
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return subprocess.Popen(command, cwd=folder, env=environment(folder, **more), **pipes)


def dist(folder: Path, script: str, *arguments: str, **more: str) -> subprocess.Popen:
    return start(folder, 'bash', str(ROOT / 'tools' / script), *arguments, **more)


def done(process: subprocess.Popen) -> None:
    output = process.communicate(timeout=900)[0]
    assert process.returncode == 0, output[-3000:]


def alone(folder: Path, tool: str, *arguments: str) -> None:
    done(start(folder, sys.executable, str(ROOT / 'tools' / tool), *arguments))


def losses(work: Path) -> Tensor:
    """Return the losses ``(iterations, kinds)``, the mean over the processes."""
    runs = [
        [list(json.loads(line).values()) for line in path.read_text().splitlines()] for path in work.glob('losses_*')
    ]
    return torch.tensor(runs).mean(0)


def test_two_processes_train_as_one(project: Path) -> None:
    options = ['--cfg-options', 'model.backbone.norm_eval=True']  # torch synchronises batch norms on GPUs alone
    alone(project, 'train.py', 'detector.py', '--work-dir', 'one', *options)
    options.append('train_dataloader.batch_size=4')
    done(dist(project, 'dist_train.sh', 'detector.py', '2', '--work-dir', 'two', *options))
    arguments, common = ['detector.py', '1', '--work-dir', 'nodes', *options], dict(NNODES='2', PORT=str(free_port()))
    nodes = [dist(project, 'dist_train.sh', *arguments, NODE_RANK=rank, **common) for rank in '01']  # this machine
    for node in nodes:
        done(node)
    one = losses(project / 'one')
    assert one.shape[0] == 8 and one.sum(1)[-1] != one.sum(1)[0]
    for name in ('two', 'nodes'):
        assert len(list((project / name).glob('losses_*'))) == 2
        torch.testing.assert_close(losses(project / name), one, rtol=1e-4, atol=1e-4, msg=lambda m, n=name: f'{n}: {m}')


def metrics(work: Path) -> dict[str, float]:
    (path,) = work.glob('*/*.json')
    return {key: value for key, value in json.loads(path.read_text()).items() if 'time' not in key}


@pytest.mark.parametrize('name', ['detector', 'segmentor'])
def test_an_evaluation_is_shared(name: str, project: Path) -> None:
    """Of five images; one of the processes sees one twice."""
    torch.save(dict(state_dict={}), project / 'none.pth')
    for processes in ('1', '2'):
        options = ['--allow-mismatch', '--work-dir', f'{name}_{processes}', '--cfg-options', 'randomness.seed=1']
        if name != 'segmentor':
            options = ['--out', f'{name}_{processes}.pkl', *options]
        if processes == '1':
            alone(project, 'test.py', f'{name}.py', 'none.pth', *options)
        else:
            done(dist(project, 'dist_test.sh', f'{name}.py', 'none.pth', processes, *options))
    one, two = (metrics(project / f'{name}_{processes}') for processes in '12')
    assert one == two and len(one) > 2
    if name != 'segmentor':
        first, second = (pickle.loads((project / f'{name}_{processes}.pkl').read_bytes()) for processes in '12')
        assert [image['img_id'] for image in first] == [image['img_id'] for image in second] and len(first) == 5
        for a, b in zip(first, second, strict=True):
            assert torch.equal(a['pred_instances']['scores'], b['pred_instances']['scores'])
