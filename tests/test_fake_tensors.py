"""Layers and the demos' models on a device that is not there: fake tensors have a device and a shape, and no numbers.

Two devices in one operator and a number that the host reads are errors. Copies between the device and the host are
noted.
"""

from __future__ import annotations

import copy
import re
from functools import partial
from typing import Any

import pytest
import torch
from conftest import ROOT, TORCH, needs_mmpretrain
from helpers.fake_tensors import DEVICES, fake_device, moved
from helpers.families import DENSE, FAMILIES, HEADS, MAP, C, build
from torch import Tensor, nn

from mmgate import gates

LAYERS = [*FAMILIES, 'softmax']
NEEDS_DRIVER = TORCH < (2, 11) and torch.version.cuda is not None and not torch.cuda.is_available()
pytestmark = [
    pytest.mark.skipif(TORCH < (2, 6), reason='fake tensors of an older torch have other limits'),
    pytest.mark.skipif(NEEDS_DRIVER, reason='fake tensors of an older CUDA build need a driver'),
]
HW = (4, 4)
CONFIGS = {
    'deformable_detr': 'plug/deformable_detr/plug-deformable-detr-refine_r18_1xb8-12e_shapes.py',
    'mask2former': 'plug/mask2former/plug-mask2former_r18_1xb8-1k_shapes-128x128.py',
    'mask_rcnn_pvt': 'agent/mask_rcnn/agent-mask-rcnn_pvt-demo_1xb8-8e_shapes.py',
    'mask_rcnn_swin': 'saga/mask_rcnn/saga-mask-rcnn_swin-demo_1xb8-8e_shapes.py',
    'classifier': 'saga/classification/saga-pvt-demo_1xb32-12e_shapes.py',
}
MODELS = [pytest.param(name, marks=needs_mmpretrain if name == 'classifier' else ()) for name in CONFIGS]
PARTS = ('features', 'tensor', 'predict', 'loss')
SIZES = [(16, 16), (8, 8), (4, 4), (2, 2)]  # of the levels of an image of 128 x 128
NUMBER = r'aten\._local_scalar_dense'
# By model and part, what a host's code reads of its tensors, and the error. A part that runs must not be here.
CANNOT = {
    ('deformable_detr', 'loss'): ('costs, for a matching by scipy', 'numpy'),
    ('mask2former', 'tensor'): ('nothing: mmseg does not have it', 'batch_data_samples'),
    ('mask2former', 'loss'): ('the classes of a map', r'aten\._unique2'),
    ('mask_rcnn_pvt', 'tensor'): ('boxes to keep', NUMBER),
    ('mask_rcnn_pvt', 'predict'): ('boxes to keep', NUMBER),
    ('mask_rcnn_pvt', 'loss'): ('anchors inside of the image', NUMBER),
    ('mask_rcnn_swin', 'tensor'): ('boxes to keep', NUMBER),
    ('mask_rcnn_swin', 'predict'): ('boxes to keep', NUMBER),
    ('mask_rcnn_swin', 'loss'): ('anchors inside of the image', NUMBER),
    ('classifier', 'loss'): ('the largest label', NUMBER),
}


def made(name: str) -> nn.Module:
    """Return a layer of any family, the ungated softmax of maps among them."""
    return gates.SoftmaxAttention(C, HEADS).eval() if name == 'softmax' else build(name)


def called(name: str, layer: nn.Module, device: str) -> Any:
    """Return a function of tokens that calls a layer with all that a host hands it on the device."""
    if name in MAP or name == 'softmax':
        return lambda x: layer(x, HW)
    if name in DENSE:
        padding = (torch.arange(16) > torch.tensor([[15], [11]])).to(device)
        return lambda x: layer(x, x, x, key_padding_mask=padding)[0]
    points = torch.linspace(0.05, 0.95, 16)[None, :, None, None].expand(2, -1, 2, 2)
    maps = dict(
        reference_points=points, spatial_shapes=torch.tensor([(3, 4), (1, 4)]), level_start_index=torch.tensor([0, 12])
    )
    return partial(layer, **moved(maps, device))


def test_every_attention_is_among_the_layers() -> None:
    """By the class of each layer, or of its gate."""
    there = [made(name) for name in LAYERS]
    classes = {type(layer) for layer in there} | {type(getattr(layer, 'gate', None)) for layer in there}
    attentions = {name: getattr(gates, name) for name in gates.__all__ if name.endswith('Attention')}
    assert [name for name, kind in attentions.items() if not {kind, getattr(kind, 'gate_type', kind)} & classes] == []


@pytest.mark.parametrize('device', DEVICES)
@pytest.mark.parametrize('name', LAYERS)
def test_a_layer_stays_on_its_device(name: str, device: str) -> None:
    layer = made(name).train()
    with fake_device(device) as transfers:
        run = called(name, layer.to(device), device)
        x = torch.randn(2, 16, C).to(device).requires_grad_(device == 'meta')
        with transfers:
            output = run(x)
            if device == 'meta':
                output.square().sum().backward()
    assert output.device == torch.device(device)
    assert transfers.found == []
    if device == 'meta':
        assert x.grad.device == x.device
        assert all(p.grad is not None and p.grad.device == x.device for p in layer.parameters() if p.requires_grad)


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16], ids=['bfloat16', 'float16'])
@pytest.mark.parametrize('name', LAYERS)
def test_a_layer_runs_under_cudas_autocast(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch sees no GPU it leaves autocast of CUDA out, so that the two questions are answered with yes."""
    monkeypatch.setattr('torch.cuda.amp.common.amp_definitely_not_available', lambda: False)
    monkeypatch.setattr('torch.cuda.is_bf16_supported', lambda: True)
    layer = made(name)
    with fake_device('cuda:0') as transfers:
        run = called(name, layer.to('cuda:0'), 'cuda:0')
        x = torch.randn(2, 16, C).to('cuda:0')
        with transfers, torch.autocast('cuda', dtype):
            assert torch.is_autocast_enabled('cuda')
            output = run(x)
    assert output.device == torch.device('cuda:0')
    assert transfers.found == []


def test_what_is_wrong_is_seen() -> None:
    x = torch.zeros(3)
    with fake_device('cuda:0') as transfers:
        x = x.to('cuda:0')
        with pytest.raises(RuntimeError, match='same device|two different devices'):
            x + torch.zeros(3)
        with pytest.raises(Exception, match='_local_scalar_dense'):
            x.sum().item()
        with transfers:
            x.cpu()
            torch.tensor([1.0, 2.0], device=x.device)
            x[torch.tensor([0, 1])]
            torch.zeros(3).copy_(x)
    kinds = [kind for kind, _ in transfers.found]
    assert kinds == [
        'aten::_to_copy from cuda to cpu',
        'aten::_to_copy from cpu to cuda',
        'aten::index from cpu to cuda',
        'aten::copy_ from cuda to cpu',
    ]


def model_and_data(name: str) -> tuple[Any, dict[str, Any]]:
    """Return a demo's model, and two images with what its losses need."""
    import mmengine.registry as registry
    from helpers.zoo import batch
    from mmengine.config import Config

    import mmgate  # noqa: F401  (registers the models)

    cfg = Config.fromfile(str(ROOT / 'configs' / CONFIGS[name]))
    registry.init_default_scope(cfg.default_scope)
    model = registry.MODELS.build(cfg.model)
    if name == 'mask2former':
        # mmdet's pixel decoder reads sizes of levels from the device. The gates are in the decoder after it.
        model.decode_head.pixel_decoder.forward = maps_of_pixels
    if cfg.default_scope != 'mmpretrain':
        return model, batch(cfg, (128, 128))
    from mmpretrain.structures import DataSample

    return model, dict(inputs=torch.randn(2, 3, 128, 128), data_samples=[DataSample().set_gt_label(1) for _ in 'ab'])


def maps_of_pixels(features: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return features of pixels and the maps of three levels, as Mask2Former's pixel decoder does."""
    maps = [features[0].new_zeros(len(features[0]), 128, side, side) for side in (4, 8, 16, 32)]
    return maps.pop(), maps


def run_part(model: Any, data: dict[str, Any], part: str) -> None:
    """Run a part of a model, and the backward pass of its losses."""
    model.train(part == 'loss')
    if part == 'features':
        model.extract_feat(data['inputs'])
        return
    output = model(**data, mode=part)
    if part == 'loss' and torch.is_grad_enabled():
        model.parse_losses(output)[0].backward()


@pytest.mark.parametrize('device', DEVICES)
@pytest.mark.parametrize('name', MODELS)
def test_a_demos_model_stays_on_its_device(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the parts in which a host reads numbers. No line of mmgate copies, or is met with two devices."""
    pytest.importorskip('mmdet')
    from mmdet.models.layers import DeformableDetrTransformerEncoder as Encoder

    # mmdet reads the sizes of the levels, one by one, of a tensor on the device.
    points = Encoder.get_encoder_reference_points
    monkeypatch.setattr(
        Encoder, 'get_encoder_reference_points', staticmethod(lambda _, *x, **y: points(SIZES, *x, **y))
    )
    model, data = model_and_data(name)
    found = {}
    with fake_device(device) as transfers:
        model.to(device)
        data = moved(data, device)
        for part in PARTS:
            try:
                with transfers:
                    run_part(model, copy.copy(data), part)
            except Exception as error:
                found[name, part] = f'{type(error).__name__}: {error}'
    expected = {key: error for key, (_, error) in CANNOT.items() if key[0] == name}
    assert found.keys() == expected.keys(), found
    assert not [message for key, message in found.items() if not re.search(expected[key], message)]
    assert [place for kind, place in transfers.found if place is not None] == []
