"""Hooks for runs that go on where they were, and stop where they break."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from mmgate.errors import ConfigError
from mmgate.train.reproducible import FiniteHook, ReproducibleHook


class Overflows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(1, 1), nn.Linear(1, 1)
        self.act = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.second(self.first(x)))


@pytest.mark.parametrize('layer', ['first', 'second', None])
def test_finite_hook_names_the_layer(layer: str | None) -> None:
    model, hook = Overflows(), FiniteHook()
    runner: Any = SimpleNamespace(model=model, iter=6)
    hook.before_train(runner)
    hook.before_train_iter(runner, 0)
    hook.after_train_iter(runner, 0, outputs=dict(loss=model(torch.ones(1, 1))))
    if layer:
        nn.init.constant_(getattr(model, layer).weight, float('inf'))
    hook.before_train_iter(runner, 0)
    loss = model(torch.ones(1, 1)) * (1 if layer else float('nan'))
    where = f'first layer whose output was not finite is {layer}$'[:-1] if layer else 'every layer was finite'
    with pytest.raises(ConfigError, match=f'loss is not finite at iteration 7; .*{where}'):
        hook.after_train_iter(runner, 0, outputs=dict(loss=[loss], other=torch.ones(1)))
    hook.after_train(runner)
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize(
    'seed, keeps, error',
    [(None, False, 'needs a seed'), (0, True, 'persistent_workers=False')],
    ids=['seed', 'workers'],
)
def test_reproducible_hook_refuses(seed: int | None, keeps: bool, error: str) -> None:
    loader = SimpleNamespace(persistent_workers=keeps, num_workers=1)
    runner = SimpleNamespace(_randomness_cfg=dict(seed=seed), train_dataloader=loader, train_loop=None)
    with pytest.raises(ConfigError, match=error):
        ReproducibleHook().before_train(runner)
