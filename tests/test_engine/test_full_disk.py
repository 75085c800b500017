"""A disk that fills up while a run saves: one message, and what was saved before is there to go on from."""

from __future__ import annotations

import logging
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import test_interrupt_hook  # noqa: F401  its data set
import torch
from mmengine.hooks import Hook
from mmengine.logging import MMLogger
from mmengine.model import BaseModel
from mmengine.registry import HOOKS, MODELS
from torch import Tensor, nn

from mmgate.engine import cli
from mmgate.engine.whole_checkpoints import keep_quiet_when_full

CONFIG = """
model = dict(type='Wide')
train_dataloader = dict(
    batch_size=4,
    num_workers=0,
    dataset=dict(type='InterruptedNoise'),
    collate_fn=dict(type='default_collate'),
    sampler=dict(type='DefaultSampler', shuffle=True))
optim_wrapper = dict(optimizer=dict(type='SGD', lr=1e-5))
train_cfg = dict(by_epoch=True, max_epochs=4)
default_hooks = dict(
    logger=dict(type='LoggerHook', interval=1),
    checkpoint=dict(type='CheckpointHook', interval=1, max_keep_ckpts=1, file_client_args=CLIENT))
custom_hooks = [dict(type='FilesUpTo', EPOCH)]
"""
ROOM = 100_000  # bytes, of which a checkpoint takes more and the log at first less


@MODELS.register_module()
class Wide(BaseModel):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 10_000)

    def forward(self, x: Tensor, mode: str = 'loss') -> Any:
        return dict(loss=self.layer(x).square().mean())


@HOOKS.register_module()
class FilesUpTo(Hook):
    """Lets no file of this process grow beyond so many bytes from an epoch on, as a full disk would."""

    def __init__(self, epoch: int = -1) -> None:
        self.epoch = epoch

    def before_train_epoch(self, runner: Any) -> None:
        if runner.epoch == self.epoch:
            resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@pytest.fixture
def limit() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize('client', ['None', "dict(backend='disk')"], ids=['backend', 'file_client_args'])
def test_one_message_and_the_run_goes_on(
    client: str, limit: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text, before = CONFIG.replace('CLIENT', client), resource.getrlimit(resource.RLIMIT_FSIZE)
    Path('config.py').write_text(text.replace('EPOCH', 'epoch=2'))
    name = f'experiment_name={tmp_path.name}'
    MMLogger.get_instance(tmp_path.name)  # the current one may write to another test's output, which is closed
    assert cli.main(cli.train, ['config.py', '--work-dir', 'work', '--cfg-options', name]) == 2
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    said = capfd.readouterr().err
    (error,) = (line for line in said.splitlines() if line.startswith('error: '))
    assert 'epoch_3.pth cannot be written (File too large)' in error
    assert 'Traceback' not in said and 'Logging error' not in said, said
    assert [path.name for path in Path('work').glob('*.pth')] == ['epoch_2.pth']
    Path('config.py').write_text(text.replace('EPOCH', ''))
    assert cli.main(cli.train, ['config.py', '--work-dir', 'work', '--resume', '--cfg-options', f'{name}again']) == 0
    assert torch.load('work/epoch_4.pth', weights_only=False)['meta']['iter'] == 16


def test_a_log_that_cannot_be_written_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    logger = logging.Logger('full')
    logger.addHandler(logging.FileHandler('/dev/full'))
    keep_quiet_when_full(logger)
    logger.warning('lost')
    assert capfd.readouterr().err == ''
    logger.warning('%d', 'no number')
    assert 'Logging error' in capfd.readouterr().err


def test_another_file_that_cannot_be_written_is_one_message(capfd: pytest.CaptureFixture[str]) -> None:
    def write(argv: list[str]) -> None:
        with open('/dev/full', 'w') as file:
            file.write('x')

    assert cli.main(write, []) == 2
    error = capfd.readouterr().err
    assert error.startswith('error: [Errno 28] No space left on device. What was saved') and error.count('\n') == 1


def test_ctrl_c_is_one_message(capfd: pytest.CaptureFixture[str]) -> None:
    def interrupted(argv: list[str]) -> None:
        raise KeyboardInterrupt

    assert cli.main(interrupted, []) == 130
    assert capfd.readouterr().err.count('\n') == 1
