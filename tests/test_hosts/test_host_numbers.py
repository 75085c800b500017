"""Numbers in small hosts: 16 bits, padding in a batch, the same seed twice."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from conftest import ROOT
from mmdet.structures import DetDataSample
from mmdet.testing import demo_mm_inputs
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
from mmengine.structures import PixelData
from mmseg.structures import SegDataSample
from torch import Tensor, nn

from mmgate.layers.base.init import gate_parameters

RESNET = dict(backbone=dict(base_channels=8))
DETR = dict(RESNET, neck=dict(in_channels=[16, 32, 64]))
HEAD = dict(in_channels=[8, 16, 32, 64])
HOSTS: dict[str, tuple[str, dict[str, Any]]] = {
    'plug_deformable_detr': (
        'plug/deformable_detr/plug-deformable-detr-refine_r18_1xb8-12e_shapes.py',
        dict(DETR, attention=dict(init='paper')),
    ),
    **{
        f'{gate}_mask2former': (
            'plug/mask2former/plug-mask2former_r18_1xb8-1k_shapes-128x128.py',
            dict(RESNET, decode_head=HEAD, attention=dict(type=kind, **options)),
        )
        for gate, kind, options in (
            ('plug', 'PLuGMultiheadAttention', dict(init='paper')),
            ('sdpa', 'SDPAGatedMultiheadAttention', {}),
            ('dgsa', 'DifferentialGatedMultiheadAttention', {}),
        )
    },
    'agent_pvt_mask_rcnn': ('agent/mask_rcnn/agent-mask-rcnn_pvt-demo_1xb8-8e_shapes.py', {}),
    'saga_pvt_mask_rcnn': ('saga/mask_rcnn/saga-mask-rcnn_pvt-demo_1xb8-8e_shapes.py', {}),
    'saga_swin_mask_rcnn': ('saga/mask_rcnn/saga-mask-rcnn_swin-demo_1xb8-8e_shapes.py', {}),
}
every_host = pytest.mark.parametrize('name', HOSTS)


def build(name: str) -> nn.Module:
    path, changes = HOSTS[name]
    logging.getLogger('mmengine').setLevel(logging.ERROR)
    cfg = Config.fromfile(ROOT / 'configs' / path)
    init_default_scope(cfg.default_scope)
    cfg.merge_from_dict(dict(model=changes))
    model = MODELS.build(cfg.model)
    model.init_weights()
    return model


def batch(model: nn.Module) -> dict[str, Any]:
    if hasattr(model, 'decode_head'):
        labels = torch.full((1, 64, 64), 255)
        labels[:, 10:40, 8:30], labels[:, 30:60, 30:60] = 2, 5
        samples = [SegDataSample(metainfo=dict(img_shape=(64, 64), ori_shape=(64, 64))) for _ in range(2)]
        for sample in samples:
            sample.gt_sem_seg = PixelData(data=labels.clone())
        data: dict[str, Any] = dict(inputs=[torch.randint(256, (3, 64, 64)) for _ in samples], data_samples=samples)
    else:
        data = demo_mm_inputs(2, [(3, 64, 64), (3, 96, 64)], num_items=[2, 3], num_classes=6, with_mask=True)
    return model.data_preprocessor(data, True)


def losses(model: nn.Module, autocast: bool = False) -> dict[str, Tensor]:
    """Return the losses of a step whose gradients the parameters keep."""
    data = batch(model)
    with torch.autocast('cpu', torch.bfloat16, enabled=autocast):
        if autocast and hasattr(model, 'roi_head'):  # mmcv's RoIAlign has no bfloat16 on the CPU
            maps = model.extract_feat(data['inputs'])
            found = {f'loss_{i}': x.float().square().mean() for i, x in enumerate(maps)}
        else:
            found = model(**data, mode='loss')
    total, parts = model.parse_losses(found)
    model.zero_grad()
    total.backward()
    return parts


@every_host
def test_a_step_in_bfloat16_is_finite(name: str) -> None:
    model = build(name).train()
    found = losses(model, autocast=True)
    gradients = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    wrong = [key for key, value in {**found, **gradients}.items() if not torch.as_tensor(value).isfinite().all()]
    assert gradients and not wrong, f'not finite: {", ".join(wrong)}'
    assert {key for key, _ in gate_parameters(model) if '.gate' in key or '.gml' in key} <= gradients.keys()


@torch.no_grad()
def test_deformable_detr_does_not_see_the_padding() -> None:
    """From the same feature maps alone and beside a larger image; what stands in the padding makes no difference."""
    model: Any = build('plug_deformable_detr').eval()
    for module in model.modules():
        if hasattr(module, 'sampling_offsets'):
            nn.init.normal_(module.sampling_offsets.weight, std=0.05)
            nn.init.normal_(module.attention_weights.weight, std=0.2)
    maps = [torch.randn(1, 128, side, side) for side in (8, 4, 2, 1)]
    padded = [torch.randn(2, 128, 2 * x.shape[2], 2 * x.shape[3]) * 50 for x in maps]
    for x, full in zip(maps, padded, strict=True):
        full[:1, :, : x.shape[2], : x.shape[3]] = x

    def attend(maps: list[Tensor], *sides: int) -> dict[str, Any]:
        metas = [dict(img_shape=(side, side), batch_input_shape=(max(sides), max(sides))) for side in sides]
        return model.forward_transformer(tuple(maps), [DetDataSample(metainfo=meta) for meta in metas])

    alone, together = attend(maps, 64), attend(padded, 64, 128)
    torch.testing.assert_close(together['hidden_states'][:, :1], alone['hidden_states'], rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(together['references'], alone['references'], strict=True):
        torch.testing.assert_close(ours[:1], theirs, rtol=1e-5, atol=1e-5)
