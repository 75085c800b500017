"""Runs that come to the same result whenever they are repeated."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.registry import DATASETS, HOOKS, MODELS
from torch import Tensor, nn

from mmgate.errors import ConfigError
from mmgate.train import cli
from mmgate.train.reproducible import ReproducibleHook

CONFIG = """
model = dict(type='RepeatedNet')
train_dataloader = dict(
    batch_size=4,
    num_workers=1,
    dataset=dict(type='RepeatedNoise'),
    collate_fn=dict(type='default_collate'),
    sampler=dict(type='SAMPLER', shuffle=True))
optim_wrapper = dict(optimizer=dict(type='AdamW', lr=1e-2))
train_cfg = dict(LOOP)
default_hooks = dict(checkpoint=dict(type='CheckpointHook', SAVED))
custom_hooks = [dict(type='mmgate.ReproducibleHook'), dict(type='Dies', step=STEP)]
randomness = dict(seed=3)
"""
LOOPS = {
    'epochs': dict(SAMPLER='DefaultSampler', LOOP='by_epoch=True, max_epochs=3', SAVED='interval=1'),
    'iterations': dict(
        SAMPLER='InfiniteSampler', LOOP='by_epoch=False, max_iters=12', SAVED='interval=4, by_epoch=False'
    ),
}


@DATASETS.register_module()
class RepeatedNoise(torch.utils.data.Dataset):
    """Draws every sample anew, as augmentations do."""

    metainfo: dict = {}

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return dict(x=torch.from_numpy(np.random.normal(index, 1, 8)).float())


@MODELS.register_module()
class RepeatedNet(BaseModel):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.3), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, x: Tensor, mode: str = 'tensor') -> dict[str, Tensor]:
        return dict(loss=(self.layers(x) - x.sum(-1, keepdim=True)).square().mean())


@HOOKS.register_module()
class Dies(Hook):
    def __init__(self, step: int) -> None:
        self.step = step

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        if runner.iter == self.step:
            raise RuntimeError('died')


def train(work: str, loop: str, *arguments: str, step: int = -1) -> int:
    text = CONFIG
    for name, value in dict(LOOPS[loop], STEP=str(step)).items():
        text = text.replace(name, value)
    Path('config.py').write_text(text)
    options = ['--cfg-options', f'experiment_name={Path.cwd().name}{work}{len(arguments)}']
    return cli.main(cli.train, ['config.py', '--work-dir', work, *arguments, *options])


@pytest.mark.parametrize('loop', LOOPS)
def test_a_run_that_died_ends_as_one_that_did_not(loop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on from its last checkpoint and draws the same batches and the same dropout, bit for bit."""
    monkeypatch.chdir(tmp_path)
    assert train('whole', loop) == 0
    with pytest.raises(RuntimeError, match='died'):
        train('died', loop, step=6)
    assert train('died', loop, '--resume') == 0
    last = 'epoch_3.pth' if loop == 'epochs' else 'iter_12.pth'
    whole, died = (torch.load(f'{work}/{last}', weights_only=False) for work in ('whole', 'died'))
    for part in ('state_dict', 'optimizer'):
        torch.testing.assert_close(died[part], whole[part], rtol=0, atol=0, msg=part)


@pytest.mark.parametrize(
    ('seed', 'keeps', 'error'),
    [(None, False, 'needs --cfg-options randomness.seed=0'), (0, True, 'persistent_workers=False')],
    ids=['seed', 'workers'],
)
def test_reproducible_hook_refuses(seed: int | None, keeps: bool, error: str) -> None:
    loader = SimpleNamespace(persistent_workers=keeps, num_workers=1)
    runner: Any = SimpleNamespace(_randomness_cfg=dict(seed=seed), train_dataloader=loader, train_loop=None)
    with pytest.raises(ConfigError, match=error):
        ReproducibleHook().before_train(runner)
