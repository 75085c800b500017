"""timm's cosine: its rate at every step, with and without a warm-up before it."""

from __future__ import annotations

import math

import pytest
import torch
from mmengine.registry import PARAM_SCHEDULERS
from torch import nn

import mmgate  # noqa: F401

RATES = (0.4, 0.1)


@pytest.mark.parametrize('least', [dict(eta_min=0.01), dict(eta_min_ratio=0.05)], ids=['minimum', 'share'])
@pytest.mark.parametrize('begin', [0, 4], ids=['whole', 'after_a_warm_up'])
def test_the_cosine_is_of_the_whole_training(begin: int, least: dict[str, float]) -> None:
    """Steps count from the start of the training, not from ``begin``, and the rate ends at the least of its group."""
    last = 10
    groups = [dict(params=[nn.Parameter(torch.zeros(1))], lr=rate) for rate in RATES]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    cosine = dict(type='mmgate.CosineLR', begin=begin, end=last + 2, T_max=last - begin, **least)
    schedule = PARAM_SCHEDULERS.build(cosine, default_args=dict(optimizer=optimizer))
    for step in range(last + 4):
        if step >= begin:
            share = (1 + math.cos(math.pi * min(step, last) / last)) / 2
            for group, full in zip(optimizer.param_groups, RATES, strict=True):
                low = least.get('eta_min', full * least.get('eta_min_ratio', 0))
                assert group['lr'] == pytest.approx(low + (full - low) * share), step
        optimizer.step()
        schedule.step()
