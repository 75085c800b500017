"""The comparison that ends an export: it sees what differs, and says when it has seen nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.exported import build
from mmengine.structures import BaseDataElement, InstanceData, PixelData
from torch import Tensor

from mmgate.deploy.build import describe_model, serve
from mmgate.deploy.compare import Differences, check_finds_something, compare
from mmgate.errors import ConfigError

BOXES = torch.tensor([[0.0, 0, 40, 40], [200, 100, 240, 140]])
SCORES, LABELS = torch.tensor([0.9, 0.8]), torch.tensor([0, 0])


def instances(boxes: Tensor = BOXES, scores: Tensor = SCORES, labels: Tensor = LABELS, **more: Tensor) -> Any:
    found = InstanceData(bboxes=boxes, scores=scores, labels=labels, **more)
    return [BaseDataElement(pred_instances=found)]


def painted(classes: Tensor, key: str = 'pred_sem_seg', layer: str = 'data', **more: Any) -> Any:
    return [BaseDataElement(**{key: PixelData(**{layer: classes})}, **more)]


def model(results: Any) -> Any:
    return SimpleNamespace(test_step=lambda batch: results)


def differences(expected: Any, actual: Any) -> Differences:
    """Compare the results of two models that return these."""
    net: Any = SimpleNamespace(serve=lambda run: None, model=model(actual))
    return compare(model(expected), net, None, [{}])


@pytest.mark.parametrize(
    ('actual', 'tolerated'),
    [
        (instances(), True),
        (instances(BOXES.flip(0) + 0.05, SCORES.flip(0)), True),  # their order is no difference
        (instances(BOXES + torch.tensor([0.2, 0, 0, 0])), False),
        (instances(BOXES * float('nan')), False),
        (instances(BOXES[[0, 0]]), False),  # two detections are not found in one
        (instances(scores=SCORES - 2e-3), False),
        (instances(labels=LABELS + 1), False),
        (instances(BOXES[[0, 1, 0]], torch.tensor([0.9, 0.8, 0.7]), torch.tensor([0, 0, 3])), False),
    ],
)
def test_sees_what_differs_in_boxes(actual: Any, tolerated: bool) -> None:
    found = differences(instances(), actual)
    assert found.tolerated() is tolerated and found.detections == 2, str(found)


def test_masks_of_small_objects_are_seen() -> None:
    masks = torch.zeros(2, 800, 1333, dtype=torch.bool)
    masks[0, :28, :28] = masks[1, 100:130, 200:230] = True
    edge = masks.clone()
    edge[0, 0, 0] = False
    assert differences(instances(masks=masks), instances(masks=edge)).tolerated()
    assert not differences(instances(masks=masks), instances(masks=masks & False)).tolerated()
    assert not differences(*(painted(m[None].long()) for m in (masks.any(0), masks.any(0) & False))).tolerated()


@pytest.mark.parametrize('gap, within', [(1e-6, True), (1e-2, False)])
def test_classes_that_tie_may_be_told_apart_either_way(gap: float, within: bool) -> None:
    logits = torch.zeros(3, 64, 64)
    logits[0] += gap
    logits[2, 0, 0] = 1
    either = (logits.argmax(0, keepdim=True), logits[1:].argmax(0, keepdim=True) + 1)
    assert differences(*(painted(x, seg_logits=PixelData(data=logits)) for x in either)).tolerated() is within


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


def test_a_file_of_another_model_is_refused() -> None:
    detector = build('plug-deformable-detr')
    for written in ('a EncoderDecoder of 6 classes', 'a DeformableDETR of 80 classes'):
        file = SimpleNamespace(path='m.onnx', notes=dict(model=written))
        with pytest.raises(ConfigError, match=rf'm\.onnx holds {written}, the config describes a DeformableDETR of 6'):
            serve(detector, file)
    serve(detector, SimpleNamespace(path='m.onnx', notes=dict(model=describe_model(detector))))
    assert 'predict' in vars(detector)
