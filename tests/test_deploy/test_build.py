"""Networks of tensors find, in PyTorch, what their hosts find, alone and padded to a batch; backbones are one graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import one_graph
from helpers.exported import FAMILIES, SIZE, batches, build
from mmengine.registry import MODELS

from mmgate import gates_disabled
from mmgate.deploy.build import build_network
from mmgate.deploy.compare import compare
from mmgate.gate import named_gate_parameters

QUICK = ('plug-deformable-detr', 'plug-mask2former', 'agent-retinanet', 'agent-mask-rcnn')
SIZES = ((96, 128), (160, 96))


@pytest.fixture(scope='module')
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp('images')


@pytest.mark.parametrize(
    'name', [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in FAMILIES]
)
def test_a_network_of_tensors_equals_its_host(name: str, folder: Path) -> None:
    model = build(name)
    net = build_network(model)
    tried = batches(name, folder, sizes=SIZES)
    if 'sizes' in net.inputs:  # what hosts do to a batch of several sizes is theirs; detectors know the padding
        tried.append({key: [part for batch in tried for part in batch[key]] for key in tried[0]})

    def run(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(net(*inputs))

    found = compare(model, build_network(model), run, tried)
    assert found.images == len(tried) + ('sizes' in net.inputs)
    most = {'corners': 1e-2, 'scores': 1e-4, 'shares of pixels': 1e-4}
    assert not found.missing and all(found.largest[name] < most[name] for name in most), str(found)


def test_gates_that_are_off_are_left_out(folder: Path) -> None:
    name = 'plug-deformable-detr'
    model = build(name)
    batch = batches(name, folder)[:1]
    with gates_disabled(model):
        net = build_network(model)
        found = compare(model, build_network(model), lambda *inputs: tuple(net(*inputs)), batch)
    assert not list(named_gate_parameters(net)) and list(named_gate_parameters(model))
    assert found.detections and found.tolerated(), str(found)


@pytest.mark.parametrize(
    'test_cfg, size', [(dict(mode='whole'), (SIZE, SIZE)), (dict(mode='slide', crop_size=(96, 64)), (96, 64))]
)
def test_is_fed_what_its_host_feeds_it(test_cfg: dict[str, Any], size: tuple[int, int], folder: Path) -> None:
    model = build('plug-mask2former')
    model.test_cfg.update(test_cfg)
    (images,) = build_network(model).preprocess(batches('plug-mask2former', folder)[0])
    assert images.shape == (1, 3, *size)


SMALL = dict(
    AgentPVT=dict(num_layers=(1, 1, 1, 1)),
    AgentSwin=dict(depths=(1, 2, 1, 1), blocks=(1, 1, 0, 0)),
    AgentCSwin=dict(),
    SAGAPVT=dict(num_layers=(1, 1, 1, 1)),
    SAGAPVTv2=dict(),
    SAGASwin=dict(depths=(1, 2, 1, 1), blocks=(1, 1, 0, 0)),
)


@one_graph
@pytest.mark.slow
@pytest.mark.parametrize('kind', SMALL)
def test_a_backbone_is_one_graph(kind: str) -> None:
    backbone = MODELS.build(dict(type=f'mmgate.{kind}', **SMALL[kind])).eval()
    images = torch.randn(1, 3, 64, 96)
    torch._dynamo.reset()
    compiled = torch.compile(backbone, backend='eager', fullgraph=True)
    with torch.no_grad():
        for found, expected in zip(compiled(images), backbone(images), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
