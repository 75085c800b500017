"""The comparison that ends an export: it sees what differs, and says when it has seen nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from exported import batches, build
from torch import Tensor, nn

from mmgate.deploy.compare import Differences, Tolerances, compare
from mmgate.deploy.networks import network, serve
from mmgate.engine.preflight import ConfigError

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
    assert not found.within(Tolerances()), str(found)


def test_the_order_of_detections_is_no_difference(detector: nn.Module, tmp_path: Path) -> None:
    found = compared(detector, 'plug-deformable-detr', tmp_path, reordered)
    assert found.within(Tolerances()) and found.detections >= 30


def test_a_segmentor_of_other_classes_differs(tmp_path: Path) -> None:
    def swapped(outputs: Outputs) -> Outputs:
        return (outputs[0].roll(1, 1),)

    model = build('plug-mask2former')
    same, other = (compared(model, 'plug-mask2former', tmp_path, change) for change in (lambda x: x, swapped))
    assert same.share == 0 and not other.within(Tolerances())


def test_images_without_detections_show_nothing(detector: nn.Module, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'no detection with a score above 1\.0 on these 2 images.*--images'):
        compared(detector, 'plug-deformable-detr', tmp_path, lambda outputs: outputs, threshold=1.0)


def test_a_file_of_another_model_is_refused(detector: nn.Module) -> None:
    class File:
        path, notes = 'm.onnx', dict(model='EncoderDecoder', outputs=['logits'])

    with pytest.raises(ConfigError, match=r'm\.onnx holds a EncoderDecoder that returns logits.*DeformableDETR'):
        serve(detector, File())
