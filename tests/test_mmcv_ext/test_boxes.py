"""NMS and soft NMS keep the boxes that mmcv's compiled operators keep, in their order."""

from __future__ import annotations

import pytest
import torch
from helpers.compiled_mmcv import by_both
from torch import Tensor

from mmgate.mmcv_ext import boxes as ours


def drawn(kind: str, number: int) -> tuple[Tensor, Tensor]:
    corner = torch.rand(number, 2) * 200
    boxes = torch.cat([corner, corner + torch.rand(number, 2) * 60], 1)
    scores = torch.rand(number)
    if kind == 'ties':
        scores = (scores * 8).round() / 8
        boxes = boxes.round() + torch.tensor([0.0, 0.0, 1.0, 1.0])  # no empty ones
    elif kind == 'zero size':
        boxes[::2, 2:] = boxes[::2, :2]
        boxes[1::4] = boxes[:1]
    elif kind == 'outside':
        boxes = boxes - 1000
    elif kind == 'chain':  # each suppresses the next, if it is not suppressed
        boxes = torch.arange(number)[:, None] * torch.tensor([1.0, 0.0, 1.0, 0.0]) + torch.tensor([0.0, 0.0, 5.0, 5.0])
        scores = torch.linspace(1, 0.1, number)
    return boxes, scores


CASES = [('empty', 0), ('one', 1), ('random', 700), ('ties', 300), ('zero size', 40), ('outside', 100), ('chain', 400)]
cases = pytest.mark.parametrize('kind, number', CASES, ids=[kind for kind, _ in CASES])


@cases
@pytest.mark.parametrize('threshold', [0.0, 0.5, 0.7])
@pytest.mark.parametrize('offset', [0, 1])
def test_nms(monkeypatch: pytest.MonkeyPatch, kind: str, number: int, threshold: float, offset: int) -> None:
    nms = pytest.importorskip('mmcv.ops').nms
    monkeypatch.setattr(ours, 'PAIRS', 4096)  # many blocks
    boxes, scores = drawn(kind, number)
    found, expected = by_both(monkeypatch, 'nms', lambda: nms(boxes, scores, threshold, offset))
    assert torch.equal(found[1], expected[1]) and torch.equal(found[0], expected[0])


@pytest.mark.parametrize('kind', ['nms', 'soft_nms'])
@pytest.mark.parametrize('split', [50, 10000], ids=['class by class', 'at once'])
@pytest.mark.parametrize('agnostic', [False, True])
def test_batched_nms(monkeypatch: pytest.MonkeyPatch, kind: str, split: int, agnostic: bool) -> None:
    batched_nms = pytest.importorskip('mmcv.ops').batched_nms
    boxes, scores = drawn('random', 200)
    classes = torch.randint(3, (200,))
    cfg = dict(type=kind, iou_threshold=0.5, split_thr=split)
    found, expected = by_both(monkeypatch, 'nms', lambda: batched_nms(boxes, scores, classes, dict(cfg), agnostic))
    torch.testing.assert_close(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


@cases
@pytest.mark.parametrize('method', ['naive', 'linear', 'gaussian'])
@pytest.mark.parametrize('offset', [0, 1])
def test_soft_nms(monkeypatch: pytest.MonkeyPatch, kind: str, number: int, method: str, offset: int) -> None:
    soft_nms = pytest.importorskip('mmcv.ops').soft_nms
    if method == 'gaussian' and (kind, offset) == ('zero size', 0):
        pytest.skip('mmcv divides 0 by 0 and goes on with scores that are no numbers')
    boxes, scores = drawn(kind, number)
    if method == 'gaussian':
        scores += torch.arange(number) * 1e-4  # exp differs in the last bit, which would decide between equal scores
    given = boxes.clone(), scores.clone()
    options = dict(iou_threshold=0.3, sigma=0.5, min_score=0.05, method=method, offset=offset)
    found, expected = by_both(monkeypatch, 'nms', lambda: soft_nms(boxes, scores, **options))
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-6)
    assert torch.equal(found[1], expected[1])
    assert torch.equal(boxes, given[0]) and torch.equal(scores, given[1])


def test_memory_grows_with_the_boxes_and_not_with_their_square(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    overlap = ours._overlap

    def counted(boxes: Tensor, others: Tensor, offset: int) -> Tensor:
        sizes.append(len(boxes) * len(others))
        return overlap(boxes, others, offset)

    monkeypatch.setattr(ours, '_overlap', counted)
    boxes, scores = drawn('random', 20000)
    ours.nms(boxes, scores, 0.3)
    assert max(sizes) <= max(ours.PAIRS, 32 * 20000)
