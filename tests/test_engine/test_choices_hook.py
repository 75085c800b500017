"""Measured choices as a part of a run."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from mmengine.model import BaseModel
from mmengine.runner import Runner
from torch import Tensor, nn

from mmgate.engine.choices_hook import KEY, BackendChoicesHook
from mmgate.ops import choices, measure, ms_deform_attn


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv('MMGATE_DISPATCH', 'measure')
    yield
    measure.forget()
    for handler in list(choices.logger.handlers):
        choices.logger.removeHandler(handler)
    choices.logger.setLevel(logging.NOTSET)


class Net(BaseModel):
    """Deformable attention, on which ``auto`` has a choice."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Linear(8, 8)

    def forward(self, x: Tensor, mode: str = 'tensor') -> Any:
        shapes, start = torch.tensor([[3, 3]]), torch.tensor([0])
        value = self.value(x).unflatten(-1, (2, 4))
        points, logits = torch.full((len(x), 5, 2, 1, 4, 2), 0.4), torch.zeros(len(x), 5, 2, 1, 4)
        y = ms_deform_attn(value, shapes, start, points, logits)
        return dict(loss=y.square().mean()) if mode == 'loss' else y


def run(work_dir: Path, fastest: str, monkeypatch: pytest.MonkeyPatch, epochs: int, resume: bool = False) -> str:
    """Train as a process of its own would where a measurement finds ``fastest``, and return the log."""
    monkeypatch.setenv('MMGATE_CACHE', str(work_dir / f'cache{epochs}'))
    monkeypatch.setattr(choices, '_carried', {})
    monkeypatch.setattr(choices, '_made', {})
    measure.forget()
    found = measure.Measurement({fastest: 0.001, **{name: 1.0 for name in ('cpu', 'torch') if name != fastest}})
    monkeypatch.setattr(measure, 'measure', lambda *args: found)
    runner = Runner(
        Net(),
        str(work_dir),
        train_dataloader=dict(
            dataset=[dict(x=torch.ones(9, 8) * i) for i in range(4)],
            batch_size=2,
            sampler=dict(type='DefaultSampler', shuffle=False),
            collate_fn=dict(type='default_collate'),
        ),
        train_cfg=dict(by_epoch=True, max_epochs=epochs),
        optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.1)),
        resume=resume,
        custom_hooks=[dict(type='mmgate.BackendChoicesHook')],
        default_scope='mmengine',
        experiment_name=f'{work_dir.name}{epochs}',
    )
    runner.train()
    return '\n'.join(path.read_text() for path in work_dir.rglob(f'{runner.timestamp}.log'))


def test_a_resumed_run_keeps_its_choices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = run(tmp_path, 'torch', monkeypatch, 1)
    assert "mmgate - INFO - ms_deform_attn runs on 'torch': torch 1 ms, cpu 1e+03 ms" in log
    saved = torch.load(tmp_path / 'epoch_1.pth', weights_only=False)['meta'][KEY]
    assert list(saved.values()) == ['torch']
    log = run(tmp_path, 'cpu', monkeypatch, 2, resume=True)
    assert '1 measured choices of backends are taken over' in log and "runs on 'torch', as measured before" in log
    assert torch.load(tmp_path / 'epoch_2.pth', weights_only=False)['meta'][KEY] == saved


def test_a_new_run_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path, 'torch', monkeypatch, 1)
    run(tmp_path, 'cpu', monkeypatch, 2)
    assert list(choices.made().values()) == ['cpu']


def test_the_log_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path, 'torch', monkeypatch, 1)
    assert not choices.logger.handlers and choices.logger.level == logging.NOTSET


def test_one_run_after_another_is_logged_once(tmp_path: Path) -> None:
    class Target(logging.Logger):
        records: list[logging.LogRecord] = []

        def handle(self, record: logging.LogRecord) -> None:
            self.records.append(record)

    class Run:
        logger = Target('run', logging.INFO)

    hook = BackendChoicesHook()
    hook.before_run(Run), BackendChoicesHook().before_run(Run)  # the first was stopped by an error
    choices.logger.info('x')
    choices.logger.debug('y')
    assert [record.getMessage() for record in Target.records] == ['x']
