"""L1 costs by broadcasting: bit for bit torch.cdist's, and mmdet's."""

from __future__ import annotations

import os
import signal
import time
from unittest.mock import patch

import numpy as np
import pytest
import torch
from helpers.matching import COSTS, META, objects, predictions
from mmdet.models.task_modules.assigners import HungarianAssigner
from mmengine.registry import init_default_scope
from torch import Tensor

from mmgate.errors import ConfigError
from mmgate.speed.matching import pairs
from mmgate.speed.matching.assigner import cost_of
from mmgate.speed.matching.pairs import BroadcastDistances, l1_distances


@pytest.mark.parametrize('dtype', [torch.float32, torch.float64], ids=str)
def test_distances_are_cdists_bit_for_bit(dtype: torch.dtype) -> None:
    """Also of no boxes, of a batch, and of numbers that are none; gradients, too."""
    for shape, count in (((7,), 3), ((300,), 40), ((1,), 1), ((5,), 0), ((0,), 4), ((2, 9), 6)):
        for scale in (1.0, 1e-6, 800.0):
            first = scale * torch.rand(*shape, 4, dtype=dtype)
            second = scale * torch.rand(*shape[:-1], count, 4, dtype=dtype)
            assert torch.equal(l1_distances(first, second), torch.cdist(first, second, p=1))
    first[0, 0, 1], first[0, 1, 2], second[0, 0, 2] = torch.nan, torch.inf, torch.inf
    torch.testing.assert_close(
        l1_distances(first, second), torch.cdist(first, second, p=1), rtol=0, atol=0, equal_nan=True
    )
    leaves = [torch.rand(count, 4, dtype=dtype, requires_grad=True) for count in (5, 3)]
    grads = [torch.autograd.grad((f(*leaves) ** 2).sum(), leaves) for f in (l1_distances, manhattan)]
    torch.testing.assert_close(*grads)


def manhattan(first: Tensor, second: Tensor) -> Tensor:
    return torch.cdist(first, second, p=1)


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_distances_are_cdists_under_autocast(dtype: torch.dtype) -> None:
    first, second = (torch.rand(count, 4).to(dtype) for count in (9, 4))
    with torch.autocast('cpu', torch.bfloat16):
        expected = torch.cdist(first, second, p=1)
        with BroadcastDistances():
            actual = torch.cdist(first, second, p=1)
    assert actual.dtype == expected.dtype == torch.float32 and torch.equal(actual, expected)


def test_the_mode_leaves_all_other_distances_alone() -> None:
    first, second = torch.rand(5, 4), torch.rand(3, 4)
    wide = torch.rand(5, 6), torch.rand(3, 6)
    expected = [torch.cdist(first, second), torch.cdist(first, second, 3.0), torch.cdist(*wide, p=1)]
    with BroadcastDistances(), patch.object(pairs, 'l1_distances', side_effect=AssertionError):
        actual = [torch.cdist(first, second), torch.cdist(first, second, 3.0), torch.cdist(*wide, p=1)]
        with pytest.raises(AssertionError):
            torch.cdist(first, second, 1)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize('name', ['focal', 'one', 'corners_and_iou'])
def test_costs_are_mmdets_bit_for_bit_without_cdist(name: str) -> None:
    init_default_scope('mmdet')
    assigner = HungarianAssigner(COSTS[name])
    generator = torch.Generator().manual_seed(0)
    for count in (0, 1, 9):
        given = predictions(generator, 30), objects(generator, count)
        costs = [cost(*given, img_meta=META) for cost in assigner.match_costs]
        with patch.object(torch._VF, 'cdist', side_effect=AssertionError('torch.cdist was called')):
            assert torch.equal(cost_of(assigner, *given, META), torch.stack(costs).sum(0))


@pytest.mark.parametrize(
    ('dtype', 'said'),
    [
        (torch.float16, "float16, where .*: train in bfloat16 .optim_wrapper.dtype='bfloat16'. or without --amp"),
        (torch.bfloat16, 'Mixed precision is on, in torch.bfloat16, so .*: lower the learning rate'),
        (None, 'Mixed precision is off, so .*: lower the learning rate'),
    ],
    ids=str,
)
def test_the_remedy_depends_on_mixed_precision(
    dtype: torch.dtype | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pairs, 'autocast_dtype', lambda kind: dtype if kind == 'cuda' else None)
    for value in (torch.nan, -torch.inf, torch.inf):
        with pytest.raises(ConfigError, match=f'of layer 2 cannot be .*: the cost is NaN or infinite in 6.*{said}'):
            pairs.match_pairs(torch.full((3, 2), value), 'layer 2')


@pytest.mark.skipif(not hasattr(os, 'fork'), reason='this system does not fork')
def test_a_forked_process_matches_after_its_parent_has() -> None:
    """As the processes that a notebook launches."""
    problems = [pairs.Problem(torch.rand(2, pairs.IN_THREADS // 4)) for _ in range(2)]
    expected = pairs.match_all(problems)
    child = os.fork()
    if not child:
        os._exit(not all(np.array_equal(*two) for two in zip(pairs.match_all(problems), expected, strict=True)))
    end = time.monotonic() + 20
    while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < end:
        time.sleep(0.01)
    if not ended[0]:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert ended == (child, 0)
