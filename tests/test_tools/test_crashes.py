"""A run killed at random, twenty times, ends where the run that was never killed ends, bit for bit."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT

KILLS = 20
CONFIG = """
custom_imports = dict(imports=['test_interrupt_hook'])
model = dict(type='InterruptedNet')
train_dataloader = dict(
    batch_size=4,
    num_workers=1,
    dataset=dict(type='InterruptedNoise'),
    collate_fn=dict(type='default_collate'),
    sampler=dict(type='DefaultSampler', shuffle=True))
optim_wrapper = dict(optimizer=dict(type='AdamW', lr=1e-2))
param_scheduler = dict(type='CosineAnnealingLR', T_max=60, by_epoch=True)
train_cfg = dict(by_epoch=True, max_epochs=60)
default_hooks = dict(
    checkpoint=dict(type='CheckpointHook', interval=1, max_keep_ckpts=2), logger=dict(type='LoggerHook'))
custom_hooks = [dict(type='mmgate.ReproducibleHook')]
randomness = dict(seed=3)
"""


def train(folder: Path, work: Path) -> subprocess.Popen:
    paths = [str(ROOT / 'tests/test_train'), str(ROOT)]  # the first has the model and the data
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(paths), OMP_NUM_THREADS='1')
    command = [sys.executable, '-W', 'ignore', str(ROOT / 'tools/train.py'), str(folder / 'config.py')]
    with (folder / 'log').open('a') as log:
        return subprocess.Popen(
            [*command, '--work-dir', str(work), '--resume'], env=environment, stdout=log, stderr=log
        )


@pytest.mark.slow
def test_twenty_kills_change_nothing(tmp_path: Path) -> None:
    (tmp_path / 'config.py').write_text(CONFIG)
    assert train(tmp_path, tmp_path / 'whole').wait(timeout=600) == 0
    rng, last = random.Random(0), Path(tmp_path, 'killed/last_checkpoint')
    kills = 0
    while kills < KILLS:
        before = last.stat().st_mtime_ns if last.exists() else 0
        process = train(tmp_path, tmp_path / 'killed')
        # until it trains, and the file has text: mmengine writes it in place, and a kill in between leaves it empty
        while process.poll() is None and not (last.exists() and last.stat().st_mtime_ns > before and last.read_text()):
            time.sleep(0.02)
        time.sleep(rng.uniform(0, 0.3))
        if process.poll() is not None:
            assert process.returncode == 0, (tmp_path / 'log').read_text()[-2000:]
            break
        process.send_signal(signal.SIGKILL)
        process.wait()
        kills += 1
    assert train(tmp_path, tmp_path / 'killed').wait(timeout=600) == 0, (tmp_path / 'log').read_text()[-2000:]
    assert kills >= KILLS // 2, 'the run was over before it could be killed'
    weights = [torch.load(tmp_path / name / 'epoch_60.pth', weights_only=False) for name in ('whole', 'killed')]
    for key, value in weights[0]['state_dict'].items():
        assert torch.equal(value, weights[1]['state_dict'][key]), key
