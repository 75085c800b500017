"""mmdet's assignments with one wait for the device."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from helpers.matching import CLASSES, COSTS, META, Waits, objects, predictions
from mmdet.models.task_modules.assigners import HungarianAssigner as MMDetHungarianAssigner
from mmengine.registry import TASK_UTILS, init_default_scope
from mmengine.structures import InstanceData

from mmgate.errors import ConfigError
from mmgate.speed.matching.assigner import AsynchronousConstants, HungarianAssigner


@pytest.mark.parametrize('costs', COSTS)
def test_assignments_are_mmdets(costs: str) -> None:
    theirs = MMDetHungarianAssigner(deepcopy(COSTS[costs]))
    ours = TASK_UTILS.build(dict(type='mmgate.HungarianAssigner', match_costs=deepcopy(COSTS[costs])))
    generator = torch.Generator().manual_seed(0)
    for case in range(150):
        queries, count = (int(torch.randint(0, 9, (), generator=generator)) for _ in range(2))
        given = predictions(generator, queries), objects(generator, count)
        if case % 3 == 0 and count > 1:  # as like as two peas
            for one in given:
                one.bboxes[-1:], one.labels = one.bboxes[:1], getattr(one, 'labels', torch.zeros(len(one))) * 0
        expected, actual = (assigner.assign(*given, META) for assigner in (theirs, ours))
        assert actual.num_gts == expected.num_gts and actual.max_overlaps is None
        for name in ('gt_inds', 'labels'):
            value = getattr(actual, name)
            assert value.dtype == torch.long and torch.equal(value, getattr(expected, name)), (case, name)


def test_infinite_costs_that_leave_a_match_are_mmdets() -> None:
    generator = torch.Generator().manual_seed(0)
    given = predictions(generator, 4), objects(generator, 2)
    given[0].bboxes[1, 2] = torch.inf
    ours, theirs = (kind(COSTS['one']).assign(*given, META) for kind in (HungarianAssigner, MMDetHungarianAssigner))
    assert ours.gt_inds.tolist() == theirs.gt_inds.tolist()


@pytest.mark.parametrize(
    ('part', 'value', 'rows', 'said'),
    [
        ('scores', torch.nan, 1, 'FocalLossCost is NaN or infinite in 2 of 8 pairs. Mixed precision is off'),
        ('bboxes', torch.inf, 4, 'BBoxL1Cost is NaN or infinite in 8 of 8 pairs, IoUCost is NaN or infinite in 8'),
    ],
    ids=['scores', 'boxes'],
)
def test_costs_that_are_no_numbers_are_named(part: str, value: float, rows: int, said: str) -> None:
    generator = torch.Generator().manual_seed(0)
    given = predictions(generator, 4), objects(generator, 2)
    given[0][part][:rows] = value
    unnamed = dict(img_shape=META['img_shape'])
    for meta, name in ((META, '0'), (dict(META, img_path='a.jpg'), 'a.jpg'), (unnamed, 'without a name')):
        with pytest.raises(ConfigError, match=f'^The predictions of image {name} cannot be matched.*: {said}'):
            HungarianAssigner(deepcopy(COSTS['focal'])).assign(*given, meta)


def test_costs_in_bfloat16_with_gradients() -> None:
    given = InstanceData(scores=9 * torch.eye(4, CLASSES).flip(0).bfloat16().requires_grad_())
    truth = InstanceData(labels=torch.arange(4))
    assigner = HungarianAssigner(dict(type='ClassificationCost'))
    assert assigner.assign(given, truth, META).gt_inds.tolist() == [4, 3, 2, 1]


def test_an_assigner_waits_once() -> None:
    generator = torch.Generator().manual_seed(0)
    given = predictions(generator, 9), objects(generator, 4)
    for kind, count in ((MMDetHungarianAssigner, 5), (HungarianAssigner, 1)):
        assigner = kind(deepcopy(COSTS['focal']))
        with Waits() as waits:
            assigner.assign(*given, META)
        assert waits.counts.total() == count, waits.counts


def test_constants_made_without_a_wait() -> None:
    with AsynchronousConstants():
        whole, away = (torch.zeros(2).new_tensor([1, 2], **to) for to in (dict(dtype=torch.long), dict(device='meta')))
    assert torch.equal(whole, torch.tensor([1, 2])) and away.is_meta and away.dtype == torch.float32


def test_constants_are_those_of_torch() -> None:
    """In code of others, which runs in the same mode."""
    like = torch.zeros(2, dtype=torch.float64)
    one = torch.tensor(1.5, requires_grad=True)
    given = ([one, one * 2], [torch.tensor([1.0]), torch.tensor([2.0])], [[one, 2]], [3, 4], 5, [], torch.tensor([7]))
    for numbers in given:
        expected = like.new_tensor(numbers)
        with AsynchronousConstants():
            actual = like.new_tensor(numbers)
        assert not actual.requires_grad and actual.dtype == expected.dtype and torch.equal(actual, expected)


@pytest.fixture(autouse=True)
def _scope() -> None:
    init_default_scope('mmdet')
