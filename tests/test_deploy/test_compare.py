"""The comparison that ends an export: it sees what differs, and says when it has seen nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from exported import batches, build
from mmengine.structures import BaseDataElement, InstanceData, PixelData
from torch import Tensor, nn

from mmgate.deploy import networks
from mmgate.deploy.compare import Differences, check_finds_something, compare
from mmgate.deploy.networks import network, serve
from mmgate.errors import ConfigError

Outputs = tuple[Tensor, ...]


@pytest.fixture(scope='module')
def detector() -> nn.Module:
    return build('plug-deformable-detr')


def compared(
    model: nn.Module, name: str, folder: Path, change: Callable[[Outputs], Outputs], **options: float
) -> Differences:
    """Compare a model with itself, its network's outputs changed."""
    net = network(model)

    def run(*inputs: Tensor) -> Outputs:
        return change(tuple(output.clone() for output in net(*inputs)))

    return compare(model, network(model), run, batches(name, folder), **options)


def moved(outputs: Outputs) -> Outputs:
    outputs[0][:, 0, 0] -= 0.2
    return outputs


def doubted(outputs: Outputs) -> Outputs:
    outputs[1][:, 0] -= 2e-3
    return outputs


def mistaken(outputs: Outputs) -> Outputs:
    outputs[2][:, 0] = (outputs[2][:, 0] + 3) % 6
    return outputs


def lost(outputs: Outputs) -> Outputs:
    outputs[1][:, 1:] = -1
    return outputs


def reordered(outputs: Outputs) -> Outputs:
    return tuple(output.flip(1) for output in outputs)  # type: ignore[return-value]


@pytest.mark.parametrize('change', [moved, doubted, mistaken, lost], ids=lambda f: f.__name__)
def test_sees_what_differs(change: Callable[[Outputs], Outputs], detector: nn.Module, tmp_path: Path) -> None:
    found = compared(detector, 'plug-deformable-detr', tmp_path, change)
    assert not found.tolerated(), str(found)


def test_the_order_of_detections_is_no_difference(detector: nn.Module, tmp_path: Path) -> None:
    found = compared(detector, 'plug-deformable-detr', tmp_path, reordered)
    assert found.tolerated() and found.detections >= 30


def test_a_segmentor_of_other_classes_differs(tmp_path: Path) -> None:
    def swapped(outputs: Outputs) -> Outputs:
        return (outputs[0].roll(1, 1),)

    model = build('plug-mask2former')
    same, other = (compared(model, 'plug-mask2former', tmp_path, change) for change in (lambda x: x, swapped))
    assert same.share == 0 and not other.tolerated()


def test_images_without_detections_show_nothing(detector: nn.Module, tmp_path: Path) -> None:
    images = batches('plug-deformable-detr', tmp_path)
    check_finds_something(detector, images, 0.05)
    with pytest.raises(ConfigError, match=r'no detection with a score above 1\.0 .* in these 2 images.*--images'):
        check_finds_something(detector, images, 1.0)


@pytest.mark.parametrize('key, layer', [('pred_sem_seg', 'data'), ('pred_panoptic_seg', 'sem_seg')])
def test_a_map_of_one_class_shows_nothing(key: str, layer: str) -> None:
    class Paints(nn.Module):
        def __init__(self, *classes: int) -> None:
            super().__init__()
            self.map = torch.tensor([classes])

        def test_step(self, batch: object) -> list[BaseDataElement]:
            return [BaseDataElement(**{key: PixelData(**{layer: self.map})})]

    check_finds_something(Paints(3, 4), [{}], 0.05)
    with pytest.raises(ConfigError, match='no map of two classes in these 1 images'):
        check_finds_something(Paints(3, 3), [{}], 0.05)


def instances(boxes: Tensor, **more: Tensor) -> list[BaseDataElement]:
    scores = torch.linspace(0.9, 0.8, len(boxes))
    labels = torch.zeros(len(boxes), dtype=torch.long)
    return [BaseDataElement(pred_instances=InstanceData(bboxes=boxes, scores=scores, labels=labels, **more))]


def differences(expected: list[BaseDataElement], actual: list[BaseDataElement]) -> Differences:
    """Compare the results of two models that return these."""
    one, other = (SimpleNamespace(test_step=lambda _, r=results: r) for results in (expected, actual))
    net: Any = SimpleNamespace(serve=lambda run: None, host=other)
    return compare(one, net, None, [{}])  # type: ignore[arg-type]


BOXES = torch.tensor([[0.0, 0, 40, 40], [200, 100, 240, 140]])


def test_what_is_no_number_differs() -> None:
    assert differences(instances(BOXES), instances(BOXES)).tolerated()
    found = differences(instances(BOXES), instances(BOXES * float('nan')))
    assert found.pixels == float('inf') and not found.tolerated()


def test_two_detections_are_not_found_in_one() -> None:
    twice = BOXES[[0, 0]]
    assert differences(instances(twice), instances(twice)).tolerated()
    found = differences(instances(twice), instances(BOXES))
    assert found.pixels == 200 and not found.tolerated()


def test_masks_of_small_objects_are_seen() -> None:
    masks = torch.zeros(2, 800, 1333, dtype=torch.bool)
    masks[0, :28, :28] = masks[1, 100:130, 200:230] = True
    edge = masks.clone()
    edge[0, 0, 0] = False
    assert differences(instances(BOXES, masks=masks), instances(BOXES, masks=edge)).tolerated()
    lost = differences(instances(BOXES, masks=masks), instances(BOXES, masks=masks & False))
    assert lost.share > 0.5 and not lost.tolerated()
    maps = [
        [BaseDataElement(pred_sem_seg=PixelData(data=m[None].long()))] for m in (masks.any(0), masks.any(0) & False)
    ]
    assert not differences(*maps).tolerated()


def test_a_file_of_another_model_is_refused(detector: nn.Module) -> None:
    class File:
        path, notes = 'm.onnx', dict(model='EncoderDecoder', outputs=['logits'])

    with pytest.raises(ConfigError, match=r'm\.onnx holds a EncoderDecoder that returns logits.*DeformableDETR'):
        serve(detector, File())
    net = network(detector)
    File.notes = dict(outputs=list(net.outputs), **net.holds()) | dict(classes=80)
    with pytest.raises(ConfigError, match=r'holds a DeformableDETR of 80 classes; the config describes .* of 6'):
        serve(detector, File())


def test_a_file_of_other_settings_is_a_warning(detector: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    net = network(detector)
    held = json.loads(json.dumps(dict(outputs=net.outputs, **net.holds())))
    said: list[str] = []
    monkeypatch.setattr(networks, 'print_log', lambda message, **_: said.append(message))
    serve(net.host, SimpleNamespace(path='m.onnx', notes=held))
    assert said == []
    held['preprocessing']['mean'], held['test_cfg']['max_per_img'] = [0, 0, 0], 1
    serve(net.host, SimpleNamespace(path='m.onnx', notes=held))
    preparation, settings = said
    assert 'written with preprocessing' in preparation and "the file's holds" in settings


@pytest.mark.parametrize('gap, within', [(1e-6, True), (1e-2, False)])
def test_classes_that_tie_may_be_told_apart_either_way(gap: float, within: bool) -> None:
    logits = torch.zeros(3, 64, 64)
    logits[0] += gap
    logits[2, 0, 0] = 1
    maps = [
        [BaseDataElement(pred_sem_seg=PixelData(data=data), seg_logits=PixelData(data=logits))]
        for data in (logits.argmax(0, keepdim=True), logits[1:].argmax(0, keepdim=True) + 1)
    ]
    assert differences(*maps).tolerated() is within
