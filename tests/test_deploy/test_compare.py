"""The comparison that ends an export: it sees what differs, and says when it has seen nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mmengine.structures import BaseDataElement, InstanceData, PixelData
from torch import Tensor

from mmgate.deploy.compare import Differences, check_finds_something, compare
from mmgate.errors import ConfigError

BOXES = torch.tensor([[0.0, 0, 40, 40], [200, 100, 240, 140]])
SCORES, LABELS = torch.tensor([0.9, 0.8]), torch.tensor([0, 0])
MASKS = torch.zeros(2, 800, 1333, dtype=torch.bool)
MASKS[0, :28, :28] = MASKS[1, 100:130, 200:230] = True
EDGE = MASKS.clone()
EDGE[0, 0, 0] = False


def instances(boxes: Tensor = BOXES, scores: Tensor = SCORES, labels: Tensor = LABELS, **more: Tensor) -> Any:
    found = InstanceData(bboxes=boxes, scores=scores, labels=labels, **more)
    return [BaseDataElement(pred_instances=found)]


def painted(classes: Tensor, key: str = 'pred_sem_seg', layer: str = 'data', **more: Any) -> Any:
    return [BaseDataElement(**{key: PixelData(**{layer: classes})}, **more)]


def tied(gap: float) -> list[Any]:
    """Return results in which two classes differ by a logit of this size, told apart either way."""
    logits = torch.zeros(3, 64, 64)
    logits[0] += gap
    logits[2, 0, 0] = 1
    either = (logits.argmax(0, keepdim=True), logits[1:].argmax(0, keepdim=True) + 1)
    return [painted(classes, seg_logits=PixelData(data=logits)) for classes in either]


def model(results: Any) -> Any:
    return SimpleNamespace(test_step=lambda batch: results)


def differences(expected: Any, actual: Any) -> Differences:
    """Compare the results of two models that return these."""
    net: Any = SimpleNamespace(serve=lambda run: None, model=model(actual))
    return compare(model(expected), net, None, [{}])


@pytest.mark.parametrize(
    ('expected', 'actual', 'tolerated'),
    [
        (instances(), instances(BOXES.flip(0) + 0.05, SCORES.flip(0)), True),  # their order is no difference
        (instances(), instances(BOXES + torch.tensor([0.2, 0, 0, 0])), False),
        (instances(), instances(BOXES * float('nan')), False),
        (instances(), instances(BOXES[[0, 0]]), False),  # two detections are not found in one
        (instances(), instances(scores=SCORES - 2e-3), False),
        (instances(), instances(labels=LABELS + 1), False),
        (instances(), instances(BOXES[[0, 1, 0]], torch.tensor([0.9, 0.8, 0.7]), torch.tensor([0, 0, 3])), False),
        (instances(masks=MASKS), instances(masks=EDGE), True),
        (instances(masks=MASKS), instances(masks=MASKS & False), False),  # small objects count, too
        (painted(MASKS.any(0)[None].long()), painted(MASKS.any(0)[None].long() * 0), False),
        (*tied(1e-6), True),
        (*tied(1e-2), False),
    ],
)
def test_sees_what_differs(expected: Any, actual: Any, tolerated: bool) -> None:
    found = differences(expected, actual)
    assert found.tolerated() is tolerated, str(found)
    assert found.detections == (2 if 'pred_instances' in expected[0] else 0)


@pytest.mark.parametrize(
    ('nothing', 'something'),
    [
        (instances(scores=torch.tensor([0.04, 0.01])), instances()),
        (painted(torch.full((1, 1, 2), 3)), painted(torch.tensor([[[3, 4]]]))),
        *[[painted(torch.tensor([[[3, n]]]), 'pred_panoptic_seg', 'sem_seg') for n in (3, 4)]],
    ],
    ids=['boxes', 'classes', 'panoptic'],
)
def test_images_that_show_nothing_are_refused(nothing: Any, something: Any) -> None:
    check_finds_something(model(something), [{}], 0.05)
    with pytest.raises(ConfigError, match=r'no detection with a score above 0\.05 .* in these images.*--images'):
        check_finds_something(model(nothing), [{}], 0.05)
