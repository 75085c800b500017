"""dist_train.sh and dist_test.sh on a CPU: as one process, on two nodes, and interrupted."""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from shapes import write_shapes
from test_end_to_end import CONFIG
from test_environment import SEGMENTOR
from torch import Tensor

pytestmark = pytest.mark.slow
NOTES = '''
import json
import os

from mmengine.dist import get_rank
from mmengine.hooks import Hook
from mmengine.registry import HOOKS


@HOOKS.register_module()
class Losses(Hook):
    """Every process writes its losses and its number, before the mean that a log has none of."""

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        losses = {key: float(value) for key, value in outputs.items() if 'loss' in key}
        with open(f'{runner.work_dir}/losses_{get_rank()}', 'a') as file:
            file.write(json.dumps(losses) + '\\n')
        number = f'{runner.work_dir}/process_{get_rank()}'
        with open(f'{number}.part', 'w') as file:
            file.write(str(os.getpid()))
        os.replace(f'{number}.part', number)  # who waits for the file reads it whole
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
auto_scale_lr = dict(base_batch_size=32)
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


def dist(folder: Path, script: str, *arguments: str, **more: str) -> subprocess.Popen:
    command = ['bash', str(ROOT / 'tools' / script), *arguments]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return subprocess.Popen(command, cwd=folder, env=environment(folder, **more), **pipes)


def on_nodes(folder: Path, count: int, processes: int, *arguments: str) -> list[subprocess.Popen]:
    """Start as many processes, on each of ``count`` nodes that are this machine."""
    common = dict(NNODES=str(count), PORT=str(free_port()))
    return [
        dist(folder, 'dist_train.sh', 'detector.py', str(processes), *arguments, NODE_RANK=str(rank), **common)
        for rank in range(count)
    ]


def wait_for(file: Path, launchers: list[subprocess.Popen]) -> None:
    deadline = time.time() + 600
    while not file.exists() and time.time() < deadline:
        assert all(launcher.poll() is None for launcher in launchers), launchers[0].communicate()[0][-3000:]
        time.sleep(0.2)


def done(process: subprocess.Popen) -> str:
    output = process.communicate(timeout=900)[0]
    assert process.returncode == 0, output[-3000:]
    return output


def alone(folder: Path, tool: str, *arguments: str) -> str:
    command = [sys.executable, str(ROOT / 'tools' / tool), *arguments]
    result = subprocess.run(
        command, cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=900, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout + result.stderr


def losses(work: Path) -> Tensor:
    """Return the losses ``(iterations, kinds)``, the mean over the processes."""
    runs = [
        [list(json.loads(line).values()) for line in path.read_text().splitlines()] for path in work.glob('losses_*')
    ]
    return torch.tensor(runs).mean(0)


def last(work: Path) -> dict[str, Tensor]:
    return torch.load(work / 'epoch_1.pth', weights_only=False)['state_dict']


def test_two_processes_train_as_one(project: Path) -> None:
    options = ['--cfg-options', 'model.backbone.norm_eval=True']  # torch synchronises batch norms on GPUs alone
    alone(project, 'train.py', 'detector.py', '--work-dir', 'one', *options)
    options.append('train_dataloader.batch_size=4')
    done(dist(project, 'dist_train.sh', 'detector.py', '2', '--work-dir', 'two', *options))
    for node in on_nodes(project, 2, 1, '--work-dir', 'nodes', *options):
        done(node)
    one = losses(project / 'one')
    assert one.shape[0] == 8 and one.sum(1)[-1] != one.sum(1)[0]
    for name in ('two', 'nodes'):
        assert len(list((project / name).glob('losses_*'))) == 2
        torch.testing.assert_close(losses(project / name), one, rtol=1e-4, atol=1e-4, msg=lambda m, n=name: f'{n}: {m}')


def test_accumulation_is_the_large_batch(project: Path) -> None:
    """mmdet divides a loss by the objects of its iteration: with as many in every image the mean is the same."""
    path = project / 'data/shapes/annotations/instances_train.json'
    content = json.loads(path.read_text())
    content['annotations'] = list({one['image_id']: one for one in content['annotations']}.values())
    path.with_name('one_each.json').write_text(json.dumps(content))
    options = [
        '--cfg-options',
        'train_dataloader.dataset.ann_file=annotations/one_each.json',
        'model.backbone.norm_eval=True',
        'param_scheduler=None',  # a warm-up that counts iterations goes on within a step
        'optim_wrapper.clip_grad=None',  # nor does Adam's division leave a gradient's size in the weights
        'optim_wrapper.optimizer.type=SGD',
        'optim_wrapper.optimizer.lr=0.001',
    ]
    alone(project, 'train.py', 'detector.py', '--work-dir', 'large', *options, 'train_dataloader.batch_size=32')
    small = [*options, 'train_dataloader.batch_size=4']
    output = alone(project, 'train.py', 'detector.py', '--work-dir', 'small', '--auto-accumulate', *small)
    assert 'accumulated over 8 = 32 a step' in output
    done(dist(project, 'dist_train.sh', 'detector.py', '2', '--work-dir', 'both', '--auto-accumulate', *small))
    large = losses(project / 'large')
    assert large.shape[0] == 2
    for name, steps in (('small', 8), ('both', 4)):
        each = losses(project / name)
        torch.testing.assert_close(each.unflatten(0, (2, steps)).mean(1), large, rtol=1e-4, atol=1e-4)
        for key, value in last(project / 'large').items():
            torch.testing.assert_close(last(project / name)[key], value, rtol=1e-4, atol=1e-5, msg=f'{name}: {key}')


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


def test_ctrl_c_saves_what_both_have_done(project: Path) -> None:
    """torchrun hands the signal on, and ends the processes 30 seconds later if they have not ended by then."""
    work = project / 'stopped'
    hooks = """custom_hooks=[dict(type='Losses'), dict(type='mmgate.SaveOnInterruptHook')]"""
    (project / 'stoppable.py').write_text(f"_base_ = './detector.py'\n{hooks}\n")
    options = ['stoppable.py', '2', '--work-dir', str(work), '--cfg-options', 'train_dataloader.batch_size=4']
    launcher = dist(project, 'dist_train.sh', *options, 'train_cfg.max_epochs=10000')
    wait_for(work / 'process_1', [launcher])
    children = subprocess.run(['pgrep', '-P', str(launcher.pid)], capture_output=True, text=True, check=True).stdout
    os.kill(int(children.split()[0]), signal.SIGINT)  # torchrun, below bash
    output = launcher.communicate(timeout=120)[0]
    saved = torch.load(work / 'interrupted.pth', weights_only=False)['meta']
    assert f'after {saved["iter"]} iterations; --resume goes on' in output
    epochs = f'train_cfg.max_epochs={saved["epoch"] + 1}'
    done(dist(project, 'dist_train.sh', *options, epochs, '--resume'))
    assert torch.load(work / f'epoch_{saved["epoch"] + 1}.pth', weights_only=False)['meta']['iter'] % 8 == 0
