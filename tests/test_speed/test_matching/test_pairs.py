"""Costs that are no numbers are named, and constants come to the device without a wait."""

from __future__ import annotations

import pytest
import torch
from mmdet.models.task_modules.assigners import HungarianAssigner
from mmengine.registry import init_default_scope

from mmgate.errors import ConfigError
from mmgate.speed.matching import pairs
from mmgate.speed.matching.pairs import AsynchronousConstants


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
    init_default_scope('mmdet')
    assigner = HungarianAssigner([dict(type='ClassificationCost'), dict(type='BBoxL1Cost')])
    monkeypatch.setattr(pairs, 'autocast_dtype', lambda kind: dtype if kind == 'cuda' else None)
    for value in (torch.nan, -torch.inf, torch.inf):
        costs = torch.stack((torch.zeros(3, 2), torch.full((3, 2), value)))
        with pytest.raises(ConfigError, match=f'of layer 2 cannot be .*: BBoxL1Cost is NaN or infinite in 6.*{said}'):
            pairs.match_pairs(assigner, costs.sum(0), costs, 'layer 2')


def test_infinite_costs_that_leave_a_match_are_no_error() -> None:
    init_default_scope('mmdet')
    cost = torch.tensor([[1.0, 2.0], [torch.inf, 0.0], [3.0, 1.0]])
    assigner = HungarianAssigner(dict(type='BBoxL1Cost'))
    assert pairs.match_pairs(assigner, cost, cost[None], '').tolist() == [[0, 1], [0, 1]]


def test_constants_are_those_of_torch() -> None:
    """In code of others, which runs in the same mode."""
    like = torch.zeros(2, dtype=torch.float64)
    one = torch.tensor(1.5, requires_grad=True)
    for numbers in ([one, one * 2], [torch.tensor([1.0])], [[one, 2]], [3, 4], 5, [], torch.tensor([7])):
        expected = like.new_tensor(numbers)
        with AsynchronousConstants():
            actual = like.new_tensor(numbers)
            moved = like.to(torch.device('meta'))
        assert not actual.requires_grad and actual.dtype == expected.dtype and torch.equal(actual, expected)
        assert moved.is_meta
