"""Networks of tensors find, in PyTorch, what their hosts find, alone and padded to a batch; others are refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.exported import FAMILIES, SIZE, batches, build
from mmengine.hub import get_config
from mmengine.registry import MODELS, init_default_scope

from mmgate.deploy.build import build_network, describe_model, serve
from mmgate.deploy.compare import compare
from mmgate.errors import ConfigError

QUICK = ('plug-deformable-detr', 'plug-mask2former', 'agent-retinanet', 'agent-mask-rcnn')
SIZES = ((96, 128), (160, 96))


@pytest.fixture(scope='module')
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp('images')


@pytest.mark.parametrize(
    'name, nms',
    [
        *(pytest.param(name, {}, marks=() if name in QUICK else pytest.mark.slow, id=name) for name in FAMILIES),
        pytest.param('agent-retinanet', dict(class_agnostic=True), id='suppression of all classes'),
    ],
)
def test_a_network_of_tensors_equals_its_host(name: str, nms: dict[str, Any], folder: Path) -> None:
    model = build(name)
    if nms:
        model.bbox_head.test_cfg.nms.update(nms)
    net = build_network(model)
    tried = batches(name, folder, sizes=SIZES)
    if 'sizes' in net.inputs:  # what hosts do to a batch of several sizes is theirs; detectors know the padding
        tried.append({key: [part for batch in tried for part in batch[key]] for key in tried[0]})

    def run(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(net(*inputs))

    found = compare(model, build_network(model), run, tried)
    most = {'corners': 1e-2, 'scores': 1e-4, 'shares of pixels': 1e-4}
    assert not found.missing and all(found.largest[name] < most[name] for name in most), str(found)


@pytest.mark.parametrize(
    'test_cfg, size', [(dict(mode='whole'), (SIZE, SIZE)), (dict(mode='slide', crop_size=(96, 64)), (96, 64))]
)
def test_is_fed_what_its_host_feeds_it(test_cfg: dict[str, Any], size: tuple[int, int], folder: Path) -> None:
    model = build('plug-mask2former')
    model.test_cfg.update(test_cfg)
    (images,) = build_network(model).preprocess(batches('plug-mask2former', folder)[0])
    assert images.shape == (1, 3, *size)


@pytest.mark.parametrize('config', ['atss/atss_r50_fpn_1x_coco.py', 'cascade_rcnn/cascade-rcnn_r50_fpn_1x_coco.py'])
def test_another_model_is_refused(config: str) -> None:
    cfg = get_config(f'mmdet::{config}').model
    cfg.backbone.update(depth=18, init_cfg=None)
    cfg.neck.in_channels = [64, 128, 256, 512]
    init_default_scope('mmdet')
    model = MODELS.build(cfg)
    with pytest.raises(ConfigError, match=rf'{type(model).__name__} cannot be exported: .* lists the models that can'):
        build_network(model)(torch.zeros(1, 3, 64, 64), torch.tensor([[64, 64]]))


def test_another_suppression_is_refused() -> None:
    model = build('agent-retinanet')
    model.bbox_head.test_cfg.nms.update(type='soft_nms')
    with pytest.raises(ConfigError, match=r'nms=.*soft_nms.* cannot be exported: ONNX has .*--cfg-options'):
        build_network(model)(torch.zeros(1, 3, 64, 64), torch.tensor([[64, 64]]))


def test_a_file_of_another_model_is_refused() -> None:
    detector = build('plug-deformable-detr')
    for written in ('a EncoderDecoder of 6 classes', 'a DeformableDETR of 80 classes'):
        file = SimpleNamespace(path='m.onnx', notes=dict(model=written))
        with pytest.raises(ConfigError, match=rf'm\.onnx holds {written}, the config describes a DeformableDETR of 6'):
            serve(detector, file)
    serve(detector, SimpleNamespace(path='m.onnx', notes=dict(model=describe_model(detector))))
    assert 'predict' in vars(detector)
