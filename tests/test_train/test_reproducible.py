"""Hooks for runs that go on where they were, and stop where they break."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mmgate.errors import ConfigError
from mmgate.train.reproducible import FiniteHook, ReproducibleHook


def test_a_loss_that_is_not_finite_ends_the_run() -> None:
    hook, runner = FiniteHook(), SimpleNamespace(iter=6)
    hook.after_train_iter(runner, 0, outputs=dict(loss=torch.ones(1), name='of no tensor'))
    with pytest.raises(ConfigError, match='^loss_bbox is not finite at iteration 7'):
        hook.after_train_iter(runner, 0, outputs=dict(loss=torch.ones(1), loss_bbox=torch.tensor([1, float('nan')])))


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
