"""Two processes on a CPU: they train as one does, with either kind of runner."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from mmengine.config import Config
from mmengine.model import MMDistributedDataParallel
from mmengine.registry import MODEL_WRAPPERS
from safetensors.torch import load_file
from torch import Tensor

from mmgate.errors import ConfigError
from mmgate.mm import cli
from mmgate.mm.processes import prepare_processes

COMPONENTS = """
import torch
from mmengine.model import BaseModel
from mmengine.registry import DATASETS, MODELS
from torch.nn.functional import mse_loss


@DATASETS.register_module()
class Points(torch.utils.data.Dataset):
    metainfo = dict(name='points')

    def __len__(self):
        return 24

    def __getitem__(self, index):
        x = torch.sin(torch.arange(6) * (index + 1.0))
        return dict(inputs=x, target=x[:2].abs())


@MODELS.register_module()
class TwoLayers(BaseModel):
    def __init__(self, idle=False):
        super().__init__()
        self.first, self.norm, self.second = torch.nn.Linear(6, 9), torch.nn.LayerNorm(9), torch.nn.Linear(9, 2)
        self.unused = torch.nn.Linear(1, 1) if idle else None

    def forward(self, inputs, target, mode):
        return dict(loss=mse_loss(self.second(self.norm(self.first(inputs)).tanh()), target))


@MODELS.register_module()
class Attending(BaseModel):
    def __init__(self):
        super().__init__()
        self.embed, self.head = torch.nn.Linear(1, 8), torch.nn.Linear(8, 2)
        self.attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, inputs, target, mode):
        x = self.embed(inputs[..., None])
        return dict(loss=mse_loss(self.head(self.attention(x, x, x)[0].mean(1)), target))
"""
CONFIG = """
custom_imports = dict(imports=['components'])
model = dict(type='TwoLayers')
train_dataloader = dict(
    batch_size=3,
    num_workers=0,
    dataset=dict(type='Points'),
    sampler=dict(type='DefaultSampler', shuffle=True),
    collate_fn=dict(type='default_collate'))
optim_wrapper = dict(
    accumulative_counts=2,
    optimizer=dict(type='AdamW', lr=0.05, weight_decay=0.1),
    paramwise_cfg=dict(norm_decay_mult=0.0),
    clip_grad=dict(max_norm=0.05, norm_type=2))
param_scheduler = dict(type='MultiStepLR', milestones=[3], end=4)
train_cfg = dict(by_epoch=True, max_epochs=4)
randomness = dict(seed=1)
env_cfg = dict(dist_cfg=dict(backend='nccl', timeout=100))  # a process that waits for nothing is an error
"""
# the gates alone train, and are averaged
GATES_ALONE = """
_base_ = './config.py'
custom_imports = dict(imports=['mmgate', 'components'])
model = dict(
    type='mmgate.Gated',
    host='Attending',
    attention=dict(path='attention', type='mmgate.PLuGMultiheadAttention'),
    train='gates')
custom_hooks = [dict(type='EMAHook'), dict(type='mmgate.GatesCheckpointHook', interval=4)]
"""
# One start of two processes for all runs: importing the packages takes longer than they do.
RUNS = """
import gc
import json
import sys
import mmgate
import torch
from mmgate.mm import cli

for config, work, options in json.loads(sys.argv[1]):
    # several runs a second: mmengine tells them apart by name and second
    options = ['--cfg-options', f'experiment_name={work}', *options]
    # not main, which ends the group of processes
    cli.train([config, '--launcher', 'pytorch', '--work-dir', work, *options])
# As main does: models, which are freed by the collector alone, hold the group and its threads.
gc.collect()
torch.distributed.destroy_process_group()
"""


def in_two_processes(folder: Path, *runs: tuple[str, str, list[str]]) -> None:
    """Train, each: config, work dir, options."""
    for name, text in dict(components=COMPONENTS, config=CONFIG, gates_alone=GATES_ALONE, runs=RUNS).items():
        (folder / f'{name}.py').write_text(text)
    environment = {**os.environ, 'PYTHONPATH': f'{ROOT}:{folder}', 'OMP_NUM_THREADS': '1', 'CUDA_VISIBLE_DEVICES': ''}
    command = ['-W', 'ignore', '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2', 'runs.py']
    result = subprocess.run(
        [sys.executable, *command, json.dumps(runs)],
        **dict(cwd=folder, env=environment, capture_output=True, text=True, timeout=300),
    )
    assert result.returncode == 0, result.stderr[-3000:]


def weights(folder: str) -> dict[str, Tensor]:
    state = torch.load(f'{folder}/epoch_4.pth', weights_only=False)['state_dict']
    return {key.removeprefix('module.'): value for key, value in state.items()}  # so mmengine's DDPStrategy saves


def test_two_processes_train_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a parameter that takes no part, clipping and accumulation."""
    idle, unused, flexible = 'model.idle=True', 'find_unused_parameters=True', 'runner_type=FlexibleRunner'
    strategy = ['type=DDPStrategy', 'model_wrapper.type=MMDistributedDataParallel', f'model_wrapper.{unused}']
    in_two_processes(
        tmp_path,
        ('config.py', 'two', [idle, unused]),
        ('config.py', 'two_flexible', [flexible]),
        ('config.py', 'two_wrapped', [flexible, idle, *(f'strategy.{option}' for option in strategy)]),
        ('gates_alone.py', 'two_gates', []),
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    options = ['--cfg-options', 'train_dataloader.batch_size=6']
    for name, config, model in (('one', 'config.py', [idle]), ('one_gates', 'gates_alone.py', [])):
        assert cli.main(cli.train, [config, '--work-dir', name, *options, *model]) == 0
    two = weights('two')
    torch.testing.assert_close(two, weights('one'), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(weights('two_wrapped'), two)
    del two['unused.weight'], two['unused.bias']
    torch.testing.assert_close(weights('two_flexible'), two)
    one, two = weights('one_gates'), weights('two_gates')
    torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-5)
    trained = {name for name in one if 'gml' in name or 'gate_' in name}
    assert trained and all(torch.equal(one[name], two[name]) for name in set(one) - trained)
    averaged = load_file('two_gates/epoch_4.gates.safetensors')
    assert set(averaged) == trained
    torch.testing.assert_close(averaged, {name: two[name] for name in trained})


@pytest.mark.parametrize('name', [None, 'MMDistributedDataParallel'])
def test_without_a_gpu_no_device_is_handed_over(monkeypatch: pytest.MonkeyPatch, name: str | None) -> None:
    monkeypatch.setattr('mmgate.mm.processes.get_device', lambda: 'cpu')
    monkeypatch.setattr('mmgate.mm.processes.is_distributed', lambda: True)
    cfg = Config(dict(launcher='pytorch', model_wrapper_cfg=name and dict(type=name)))
    prepare_processes(cfg)
    assert cfg.model_wrapper_cfg.device_ids is None
    assert MODEL_WRAPPERS.get(cfg.model_wrapper_cfg.type) is MMDistributedDataParallel


def test_slurm_is_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = Config(dict(launcher='slurm'))
    monkeypatch.setattr('mmgate.mm.processes.get_device', lambda: 'cuda')
    prepare_processes(cfg)
    assert dict(cfg) == dict(launcher='slurm')
    monkeypatch.setattr('mmgate.mm.processes.get_device', lambda: 'cpu')
    with pytest.raises(ConfigError, match='--launcher slurm needs GPUs'):
        prepare_processes(cfg)
