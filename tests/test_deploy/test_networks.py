"""Networks of tensors find, in PyTorch, what their hosts find: in images alone and padded to one batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from exported import FAMILIES, batches, build

from mmgate.deploy.compare import compare
from mmgate.deploy.networks import network

QUICK = ('plug-deformable-detr', 'plug-mask2former', 'agent-retinanet', 'agent-mask-rcnn')
SIZES = ((96, 128), (160, 96))


@pytest.fixture(scope='module')
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp('images')


@pytest.mark.parametrize(
    'name', [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in FAMILIES]
)
def test_equals_its_host(name: str, folder: Path) -> None:
    model = build(name)
    net = network(model)
    tried = batches(name, folder, sizes=SIZES)
    if 'sizes' in net.inputs:  # what hosts do to a batch of several sizes is theirs; detectors know the padding
        tried.append({key: [part for batch in tried for part in batch[key]] for key in tried[0]})

    def run(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(net(*inputs))

    found = compare(model, network(model), run, tried)
    assert found.images == len(tried) + ('sizes' in net.inputs)
    assert not found.missing and found.pixels < 1e-2 and found.score < 1e-4 and found.share < 1e-4, str(found)
