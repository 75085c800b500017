"""Runs that come to the same result whenever they are repeated."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mmgate.errors import ConfigError
from mmgate.train.reproducible import ReproducibleHook


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
