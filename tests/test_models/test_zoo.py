"""One config of every architecture in the zoos that a gate fits: built, gated, compared with itself, and trained."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
import zoo
from torch import Tensor

pytestmark = pytest.mark.slow
# config, attentions that are replaced once it is reduced, mode
ZOO: dict[str, tuple[str, int, str]] = {
    'atss_dyhead_swin': ('mmdet::dyhead/atss_swin-l-p4-w12_fpn_dyhead_ms-2x_coco.py', 8, 'tensor'),
    'conditional_detr': ('mmdet::conditional_detr/conditional-detr_r50_8xb2-50e_coco.py', 6, 'tensor'),
    'dab_detr': ('mmdet::dab_detr/dab-detr_r50_8xb2-50e_coco.py', 6, 'tensor'),
    'ddq': ('mmdet::ddq/ddq-detr-4scale_r50_8xb2-12e_coco.py', 6, 'tensor'),
    'deformable_detr': ('mmdet::deformable_detr/deformable-detr_r50_16xb2-50e_coco.py', 6, 'tensor'),
    'detr': ('mmdet::detr/detr_r18_8xb2-500e_coco.py', 6, 'tensor'),
    'dino': ('mmdet::dino/dino-4scale_r50_8xb2-12e_coco.py', 6, 'tensor'),
    'glip': ('mmdet::glip/glip_atss_swin-t_b_fpn_dyhead_16xb2_ms-2x_funtune_coco.py', 9, 'loss'),
    'grounding_dino': ('mmdet::grounding_dino/grounding_dino_r50_scratch_8xb2_1x_coco.py', 12, 'loss'),
    'mm_grounding_dino': ('mmdet::mm_grounding_dino/grounding_dino_swin-t_pretrain_obj365.py', 20, 'loss'),
    'mask2former': ('mmdet::mask2former/mask2former_r50_8xb2-lsj-50e_coco.py', 6, 'tensor'),
    'mask2former_panoptic': ('mmdet::mask2former/mask2former_r50_8xb2-lsj-50e_coco-panoptic.py', 6, 'tensor'),
    'mask2former_vis': ('mmdet::mask2former_vis/mask2former_r50_8xb2-8e_youtubevis2021.py', 6, 'loss'),
    'maskformer': ('mmdet::maskformer/maskformer_r50_ms-16xb1-75e_coco.py', 6, 'tensor'),
    'mask_rcnn_swin': ('mmdet::swin/mask-rcnn_swin-t-p4-w7_fpn_1x_coco.py', 8, 'tensor'),
    'queryinst': ('mmdet::queryinst/queryinst_r50_fpn_1x_coco.py', 6, 'tensor'),
    'retinanet_pvt': ('mmdet::pvt/retinanet_pvt-t_fpn_1x_coco.py', 4, 'tensor'),
    'retinanet_pvtv2': ('mmdet::pvt/retinanet_pvtv2-b0_fpn_1x_coco.py', 4, 'tensor'),
    'sparse_rcnn': ('mmdet::sparse_rcnn/sparse-rcnn_r50_fpn_1x_coco.py', 6, 'tensor'),
    'beit': ('mmseg::beit/beit-base_upernet_8xb2-160k_ade20k-640x640.py', 4, 'tensor'),
    'dpt': ('mmseg::dpt/dpt_vit-b16_8xb2-160k_ade20k-512x512.py', 4, 'tensor'),
    'knet': ('mmseg::knet/knet-s3_r50-d8_fcn_8xb2-adamw-80k_ade20k-512x512.py', 1, 'tensor'),
    'mae': ('mmseg::mae/mae-base_upernet_8xb2-amp-160k_ade20k-512x512.py', 4, 'tensor'),
    'mask2former_ade': ('mmseg::mask2former/mask2former_r50_8xb2-160k_ade20k-512x512.py', 6, 'loss'),
    'maskformer_ade': ('mmseg::maskformer/maskformer_r50-d32_8xb2-160k_ade20k-512x512.py', 4, 'loss'),
    'san': ('mmseg::san/san-vit-b16_coco-stuff164k-640x640.py', 16, 'loss'),
    'segformer': ('mmseg::segformer/segformer_mit-b0_8xb2-160k_ade20k-512x512.py', 4, 'tensor'),
    'segmenter': ('mmseg::segmenter/segmenter_vit-t_mask_8xb1-160k_ade20k-512x512.py', 4, 'tensor'),
    'setr': ('mmseg::setr/setr_vit-l_pup_8xb2-160k_ade20k-512x512.py', 4, 'tensor'),
    'swin': ('mmseg::swin/swin-tiny-patch4-window7-in1k-pre_upernet_8xb2-160k_ade20k-512x512.py', 8, 'tensor'),
    'twins_pcpvt': ('mmseg::twins/twins_pcpvt-s_fpn_fpnhead_8xb4-80k_ade20k-512x512.py', 8, 'tensor'),
    'twins_svt': ('mmseg::twins/twins_svt-s_uperhead_8xb2-160k_ade20k-512x512.py', 8, 'tensor'),
    'vit': ('mmseg::vit/vit_deit-s16_upernet_8xb2-80k_ade20k-512x512.py', 4, 'tensor'),
}
TRAINED = ('dino', 'grounding_dino', 'segformer', 'beit', 'conditional_detr', 'segmenter')
UNGATED = ('dino', 'mask2former')


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logger = logging.getLogger('mmengine')
    before = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(before)


def assert_close(actual: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    """Compare with the largest value of each output, or with 1."""
    assert len(actual) == len(expected) > 0
    for a, e in zip(actual, expected, strict=True):
        assert e.isfinite().all()
        torch.testing.assert_close(a, e, rtol=0, atol=tolerance * max(1.0, e.abs().max().item()))


@pytest.mark.parametrize('name', ZOO)
def test_identity_start(name: str) -> None:
    config, count, mode = ZOO[name]
    cfg = zoo.reduced(config)
    model, data = zoo.build(cfg), zoo.batch(cfg)
    expected = zoo.forward(model, data, mode)
    assert len(zoo.gate(model)) == count
    assert_close(zoo.forward(model, data, mode), expected, 1e-4)


@pytest.mark.parametrize('name', TRAINED)
def test_training_step(name: str) -> None:
    """Losses are finite and every kind of gate moves."""
    cfg = zoo.reduced(ZOO[name][0])
    model, data = zoo.build(cfg), zoo.batch(cfg)
    zoo.gate(model)
    model.train()
    gates = {n: p for n, p in model.named_parameters() if '.gml.' in n or '.gate_' in n}
    before = {n: p.detach().clone() for n, p in gates.items() if '.gml.' in n}
    losses = {n: loss for n, loss in model(**data, mode='loss').items() if 'loss' in n}
    total = sum(sum(loss) if isinstance(loss, (list, tuple)) else loss for loss in losses.values())
    assert total.isfinite()
    optimizer = torch.optim.AdamW(gates.values(), lr=1e-3, weight_decay=0)
    total.backward()
    optimizer.step()
    moved = {n for n, p in before.items() if not torch.equal(p, gates[n])}
    assert len(moved) > len(before) / 2, sorted(set(before) - moved)


@pytest.mark.parametrize('name', UNGATED)
def test_the_gate_that_gates_nothing(name: str) -> None:
    config, _, mode = ZOO[name]
    cfg = zoo.reduced(config)
    model, data = zoo.build(cfg), zoo.batch(cfg)
    expected, losses = zoo.forward(model, data, mode), zoo.forward(model, data, 'loss')
    zoo.swap_attention(model, dict(type='MultiScaleDeformableAttention', path='**'))
    assert_close(zoo.forward(model, data, mode), expected, 1e-5)
    assert_close(zoo.forward(model, data, 'loss'), losses, 1e-5)
