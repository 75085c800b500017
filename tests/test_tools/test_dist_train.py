"""The shell scripts: what they launch, and on a CPU two nodes, and two processes, as one process."""

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
from mmengine.config import Config
from shapes import write_shapes
from torch import Tensor

from mmgate.analysis.loading import UNTRAINED, load_model

NODES = dict(NNODES='3', NODE_RANK='2', MASTER_ADDR='node0', PORT='29')


@pytest.mark.parametrize(
    'script, arguments, expected',
    [
        ('dist_train.sh', ['c.py', '8', '--amp'], '--nproc_per_node=8 TOOLS/train.py c.py --launcher pytorch --amp'),
        ('dist_test.sh', ['c.py', 'x.pth', '2'], '--nproc_per_node=2 TOOLS/test.py c.py x.pth --launcher pytorch'),
        ('slurm_train.sh', ['p', 'j', 'c.py', 'w d'], 'TOOLS/train.py c.py --work-dir=w d --launcher slurm'),
        ('slurm_test.sh', ['p', 'j', 'c.py', 'x.pth'], '--partition=p --job-name=j TOOLS/test.py c.py x.pth'),
    ],
)
def test_shell_scripts_launch(tmp_path: Path, script: str, arguments: list[str], expected: str) -> None:
    """On several machines; with a launcher that prints its arguments."""
    for launcher in ('torchrun', 'srun'):
        (tmp_path / launcher).write_text('#!/bin/sh\necho "$@"\n')
        (tmp_path / launcher).chmod(0o755)
    environment = {**os.environ, **NODES, 'PATH': f'{tmp_path}:{os.environ["PATH"]}'}
    command = ['bash', str(ROOT / 'tools' / script), *arguments]
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert os.access(command[1], os.X_OK)
    nodes = '--nnodes=3 --node_rank=2 --master_addr=node0 --master_port=29 ' if script.startswith('dist') else ''
    for part in (nodes + expected.replace('TOOLS', str(ROOT / 'tools'))).split(' '):
        assert part in printed.split(), printed


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
# The detector, smaller, without what differs from process to process: torch synchronises batch norms on GPUs alone.
PARALLEL = f"""{CONFIG.replace('EPOCHS', '1')}
custom_imports = dict(imports=['mmgate', 'notes'])
custom_hooks = [dict(type='Losses')]
train_pipeline = [
    dict(type='LoadImageFromFile'), dict(type='LoadAnnotations', with_bbox=True), dict(type='PackDetInputs')]
train_dataloader.update(batch_size=8, dataset=dict(pipeline=train_pipeline))
test_dataloader.update(batch_size=1)
model['backbone'].update(norm_eval=True)
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
    (folder / 'detector.py').write_text(PARALLEL)
    (folder / 'segmentor.py').write_text(SEGMENTOR)
    return folder


def losses(work_dir: Path) -> Tensor:
    """Return the losses of a run of that config ``(iterations, kinds)``, the mean over the processes."""
    files = [path.read_text().splitlines() for path in work_dir.glob('losses_*')]
    return torch.tensor([[list(json.loads(line).values()) for line in lines] for lines in files]).mean(0)


def free_port() -> str:
    with socket.socket() as server:
        server.bind(('127.0.0.1', 0))
        return str(server.getsockname()[1])


def run(folder: Path, script: str, *arguments: str, nodes: int = 1) -> None:
    """Run a script of ``tools``, of Python or of a shell, in a project's folder, once for each node."""
    program = sys.executable if script.endswith('.py') else 'bash'
    scripts = f'{Path(sys.executable).parent}:{os.environ["PATH"]}'
    settings = dict(PYTHONPATH=f'{ROOT}:{folder}', PATH=scripts, OMP_NUM_THREADS='1', CUDA_VISIBLE_DEVICES='')
    settings |= dict(PYTHONWARNINGS='ignore', PORT=free_port(), NNODES=str(nodes))
    command = [program, str(ROOT / 'tools' / script), *arguments]
    pipes = dict(cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    ranks = [{**os.environ, **settings, 'NODE_RANK': str(rank)} for rank in range(nodes)]
    for process in [subprocess.Popen(command, env=environment, **pipes) for environment in ranks]:
        output = process.communicate(timeout=900)[0]
        assert process.returncode == 0, output[-3000:]


@pytest.mark.slow
def test_two_nodes_train_as_one_process(project: Path) -> None:
    run(project, 'train.py', 'detector.py', '--work-dir', 'one')
    options = ['--work-dir', 'nodes', '--cfg-options', 'train_dataloader.batch_size=4']
    run(project, 'dist_train.sh', 'detector.py', '1', *options, nodes=2)  # both on this machine
    one = losses(project / 'one')
    assert one.shape[0] == 8 and one.sum(1)[-1] != one.sum(1)[0]
    assert len(list((project / 'nodes').glob('losses_*'))) == 2
    torch.testing.assert_close(losses(project / 'nodes'), one, rtol=1e-4, atol=1e-4)


def metrics(work: Path) -> dict[str, float]:
    (path,) = work.glob('*/*.json')
    return {key: value for key, value in json.loads(path.read_text()).items() if 'time' not in key}


@pytest.mark.slow
@pytest.mark.parametrize('name', ['detector', 'segmentor'])
def test_an_evaluation_is_shared(name: str, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of five images; one of the processes sees one twice."""
    monkeypatch.chdir(project)
    monkeypatch.syspath_prepend(project)
    # mmdet leaves the memory of some parameters as it was until a model is initialised, which a test does not do.
    weights = load_model(Config.fromfile(f'{name}.py'), UNTRAINED).model.state_dict()
    torch.save(dict(state_dict=weights), f'{name}.pth')
    for processes in ('1', '2'):
        options = ['--work-dir', f'{name}_{processes}']
        if name != 'segmentor':
            options = ['--out', f'{name}_{processes}.pkl', *options]
        script, number = ('test.py', []) if processes == '1' else ('dist_test.sh', ['2'])
        run(project, script, f'{name}.py', f'{name}.pth', *number, *options)
    one, two = (metrics(project / f'{name}_{processes}') for processes in '12')
    assert one == two and len(one) > 2
    if name != 'segmentor':
        first, second = (pickle.loads((project / f'{name}_{processes}.pkl').read_bytes()) for processes in '12')
        assert [image['img_id'] for image in first] == [image['img_id'] for image in second] and len(first) == 5
        for a, b in zip(first, second, strict=True):
            assert torch.equal(a['pred_instances']['scores'], b['pred_instances']['scores'])
