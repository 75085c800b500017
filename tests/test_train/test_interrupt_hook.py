"""Ctrl-C and SIGTERM save a run, which goes on where it was and ends as if nothing had happened, bit for bit."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from mmengine.evaluator import BaseMetric
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.registry import DATASETS, HOOKS, METRICS, MODELS
from torch import Tensor, nn

from mmgate.train import cli, interrupt_hook

CONFIG = """
model = dict(type='InterruptedNet')
loader = dict(
    batch_size=4,
    num_workers=WORKERS,
    dataset=dict(type='InterruptedNoise'),
    collate_fn=dict(type='default_collate'),
    sampler=dict(type='SAMPLER', shuffle=True))
train_dataloader = loader
val_dataloader = dict(loader, sampler=dict(type='DefaultSampler', shuffle=False))
val_evaluator = dict(type='InterruptedMetric')
val_cfg = dict()
optim_wrapper = dict(optimizer=dict(type='AdamW', lr=1e-2), accumulative_counts=2)
param_scheduler = [
    dict(type='CosineAnnealingLR', T_max=24, by_epoch=False),
    dict(type='MultiStepLR', milestones=[3], by_epoch=True)]
train_cfg = dict(LOOP)
default_hooks = dict(checkpoint=dict(type='CheckpointHook', interval=24, out_dir='kept', by_epoch=False))
custom_hooks = [
    dict(type='mmgate.ReproducibleHook'),
    dict(type='mmgate.SaveOnInterruptHook'),
    dict(type='EMAHook'),
    dict(type='Tell', TELL)]
randomness = dict(seed=3)
"""
EPOCHS = dict(SAMPLER='DefaultSampler', LOOP='by_epoch=True, max_epochs=6, val_interval=2')
ITERATIONS = dict(SAMPLER='InfiniteSampler', LOOP='by_epoch=False, max_iters=24, val_interval=8')


@DATASETS.register_module()
class InterruptedNoise(torch.utils.data.Dataset):
    """Draws every sample anew, as augmentations do."""

    metainfo: dict = {}

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return dict(x=torch.from_numpy(np.random.normal(index, 1, 8)).float())


@MODELS.register_module()
class InterruptedNet(BaseModel):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.3), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, x: Tensor, mode: str = 'tensor') -> Any:
        y = self.layers(x)
        return dict(loss=(y - x.sum(-1, keepdim=True)).square().mean()) if mode == 'loss' else list(y)


@METRICS.register_module()
class InterruptedMetric(BaseMetric):
    def process(self, data_batch: Any, data_samples: Any) -> None:
        self.results += [float(one) for one in data_samples]

    def compute_metrics(self, results: list) -> dict[str, float]:
        return dict(mean=sum(results) / len(results))


@HOOKS.register_module()
class Tell(Hook):
    """Sends a signal to this process, and SIGTERM to the loaders' workers, too."""

    def __init__(self, name: str = '', step: int = -1, at: str = 'train', times: int = 1) -> None:
        self.name, self.step, self.at, self.times = name, step, at, times

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        if self.at == 'train' and runner.iter == self.step:
            self._tell()

    def before_val_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        if self.at == 'val' and runner.iter == self.step and not batch_idx:
            self._tell()

    def _tell(self) -> None:
        for _ in range(self.times):
            if self.name == 'SIGTERM':
                for worker in multiprocessing.active_children():
                    subprocess.run(['kill', str(worker.pid)], check=True)  # by another process, as a cluster does
            signal.raise_signal(signal.Signals[self.name])


def config(**settings: str) -> str:
    text = CONFIG
    for name, value in (dict(TELL='') | settings).items():
        text = text.replace(name, value)
    return text


def train(work: str, *arguments: str, **settings: str) -> int:
    Path('config.py').write_text(config(**settings))
    options = ['--cfg-options', f'experiment_name={Path.cwd().name}{work}{len(arguments)}']
    return cli.main(cli.train, ['config.py', '--work-dir', work, *arguments, *options])


@pytest.mark.parametrize(
    'loop, workers, tell, saved',
    [
        (EPOCHS, '0', "name='SIGINT', step=12", (3, 14, 2)),
        (EPOCHS, '1', "name='SIGTERM', step=13", (3, 14, 2)),
        (EPOCHS, '0', "name='SIGINT', step=15", (3, 16, 4)),
        (EPOCHS, '0', "name='SIGINT', step=16, at='val'", (4, 18, 2)),
        (ITERATIONS, '1', "name='SIGTERM', step=12", (0, 14, None)),
    ],
    ids=['in an epoch', 'with a worker', 'at its end', 'in a validation', 'iterations'],
)
def test_a_saved_run_ends_as_one_that_was_not_stopped(
    loop: dict,
    workers: str,
    tell: str,
    saved: tuple[int, int, int | None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = dict(loop, WORKERS=workers)
    assert train('whole', **settings) == 0
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit) as ended:
        train('stopped', **settings, TELL=tell)
    assert ended.value.code == (143 if 'SIGTERM' in tell else 130) and signal.getsignal(signal.SIGINT) is before
    path = 'kept/stopped/interrupted.pth'
    assert Path('stopped/last_checkpoint').read_text() == path
    meta = torch.load(path, weights_only=False)['meta']
    in_epoch = meta.get('mmgate_interrupted')
    assert (meta['epoch'], meta['iter'], in_epoch and in_epoch['batches']) == saved
    assert train('stopped', '--resume', **settings) == 0
    whole, stopped = (torch.load(f'kept/{name}/iter_24.pth', weights_only=False) for name in ('whole', 'stopped'))
    for part in ('state_dict', 'ema_state_dict', 'optimizer'):
        torch.testing.assert_close(stopped[part], whole[part], rtol=0, atol=0, msg=part)
    assert stopped['param_schedulers'][0]['last_step'] == whole['param_schedulers'][0]['last_step']


def test_a_run_that_died_ends_as_one_that_did_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on from an epoch's checkpoint, as after a crash or SIGKILL."""

    def die(number: int, frame: Any) -> None:
        raise RuntimeError('died')

    monkeypatch.chdir(tmp_path)
    before = signal.signal(signal.SIGUSR1, die)
    settings = dict(EPOCHS, WORKERS='1') | {"interval=24, out_dir='kept', by_epoch=False": "out_dir='kept'"}
    assert train('whole', **settings) == 0
    with pytest.raises(RuntimeError, match='died'):
        train('died', **settings, TELL="name='SIGUSR1', step=14")
    signal.signal(signal.SIGUSR1, before)
    assert train('died', '--resume', **settings) == 0
    whole, died = (torch.load(f'kept/{name}/epoch_6.pth', weights_only=False) for name in ('whole', 'died'))
    torch.testing.assert_close(died['state_dict'], whole['state_dict'], rtol=0, atol=0)


def test_a_cluster_ends_the_workers_too(tmp_path: Path) -> None:
    """``timeout`` and slurm signal the whole group: what a killed worker makes torch say is no error of the run."""
    loop = 'by_epoch=True, max_epochs=10**6, val_begin=10**6'
    text = config(SAMPLER='DefaultSampler', LOOP=loop, WORKERS='2, persistent_workers=True')
    (tmp_path / 'config.py').write_text(text.replace("dict(type='mmgate.ReproducibleHook'),", ''))
    run = "from test_interrupt_hook import cli; cli.main(cli.train, ['config.py', '--work-dir', 'work'])"
    command = [sys.executable, '-W', 'ignore', '-c', run]
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get('PYTHONPATH', '')])
    environment = {**os.environ, 'PYTHONPATH': paths}
    with (tmp_path / 'log').open('w') as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, cwd=tmp_path, env=environment, start_new_session=True
        )
    deadline = time.time() + 120
    while not list(tmp_path.rglob('last_checkpoint')) and time.time() < deadline and process.poll() is None:
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGTERM)
    status, said = process.wait(timeout=120), (tmp_path / 'log').read_text()
    assert status == 143 and 'the run is saved as' in said and 'Traceback' not in said, said[-3000:]


def test_a_second_ctrl_c_ends_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = dict(EPOCHS, WORKERS='0', TELL="name='SIGINT', step=12, times=2")
    with pytest.raises(SystemExit):
        train('forwarded', **settings)  # within a second: a launcher hands on what the terminal sent
    monkeypatch.setattr(interrupt_hook, 'FORWARDED', 0.0)
    assert train('second', **settings) == 130
    assert 'Saving after a step of training, if one is left; Ctrl-C once more' in capfd.readouterr().err
    assert Path('kept/forwarded/interrupted.pth').is_file() and not Path('kept/second/interrupted.pth').exists()


def test_an_epoch_of_another_length_starts_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = dict(EPOCHS, WORKERS='0')
    with pytest.raises(SystemExit):
        train('stopped', **settings, TELL="name='SIGINT', step=12")
    monkeypatch.setattr(InterruptedNoise, '__len__', lambda self: 20)
    assert train('stopped', '--resume', **settings) == 0
    assert 'interrupted after 2 of 4 batches of an epoch, which has 5 now' in capfd.readouterr().out


def test_processes_of_others_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    children = [SimpleNamespace(daemon=daemon, kill=lambda d=daemon: ended.append(d)) for daemon in (True, False)]
    ended: list[bool] = []
    monkeypatch.setattr(multiprocessing, 'active_children', lambda: children)
    monkeypatch.setattr(interrupt_hook.signal, 'signal', lambda *_: None)
    interrupt_hook._end_workers()
    assert ended == [True]
