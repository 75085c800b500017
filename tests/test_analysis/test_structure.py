"""Structures of configs without their weights, for every config of mmdet and mmseg, and the rules to paste."""

from __future__ import annotations

import pytest
import torch
from conftest import needs_mmpretrain
from mmcv.cnn.bricks.transformer import MultiheadAttention
from mmdet.models.backbones.pvt import SpatialReductionAttention
from mmdet.models.utils.vlfuse_helper import BiMultiHeadAttention as Fused
from mmengine.config import Config
from mmengine.hub import get_config
from torch import nn

import mmgate
from mmgate.analysis.structure import build_structure, list_attention, rules_to_paste
from mmgate.errors import ConfigError
from mmgate.mm.config_file import read_config
from mmgate.registry import MODELS
from mmgate.rules import read_rules

DENSE = {'PLuGMultiheadAttention', 'SDPAGatedMultiheadAttention', 'DifferentialGatedMultiheadAttention'}
MAP = {'AgentAttention', 'SAGAAttention'}
DEFORMABLE = {'PLuGMultiScaleDeformableAttention'}


SWIN = 'mmdet::swin/mask-rcnn_swin-t-p4-w7_fpn_1x_coco.py'


@pytest.mark.parametrize(
    'config, path, gates',
    [
        (SWIN, 'backbone.stages.0.blocks.0.attn', MAP),
        (SWIN, 'backbone.stages.0.blocks.0.attn.w_msa', DENSE),
        ('mmdet::pvt/retinanet_pvt-t_fpn_1x_coco.py', 'backbone.layers.0.1.1.attn', DENSE | MAP),
        ('mmseg::vit/vit_vit-b16_mln_upernet_8xb2-80k_ade20k-512x512.py', 'backbone.layers.0.attn', DENSE),
        ('mmdet::deformable_detr/deformable-detr_r50_16xb2-50e_coco.py', 'encoder.layers.0.self_attn', DEFORMABLE),
    ],
    ids=['swin', 'windows', 'pvt', 'vit', 'deformable'],
)
def test_a_structure_has_the_attention_that_gates_fit_and_rules_to_paste(
    config: str, path: str, gates: set[str]
) -> None:
    """Every text gates the module of its line, and those alike; nothing of this takes memory."""
    model = build_structure(get_config(config))
    real = sum(p.numel() for p in model.parameters() if p.device != torch.device('meta'))
    assert real < 0.05 * sum(p.numel() for p in model.parameters())
    listed = {row.path: row for row in list_attention(model)}
    fitting = set(listed[path].gates)
    assert gates <= fitting and all(bool(of & gates) == bool(of & fitting) for of in (MAP, DENSE, DEFORMABLE))
    texts = rules_to_paste(model, [*listed.values()])
    assert texts
    for text in dict.fromkeys(texts.values()):
        gated = mmgate.swap_attention(model, read_rules(text))
        assert set(gated) >= {path for path, of in texts.items() if of == text}
        assert not set(rules_to_paste(model, list_attention(model))) & set(gated)
        mmgate.restore_attention(model)


class DerivedAttention(MultiheadAttention):
    """No rule fits it, but the module in it."""


def test_an_attention_has_one_row_by_the_path_that_a_rule_takes() -> None:
    model = nn.ModuleDict(dict(a=MultiheadAttention(8, 2), b=MultiheadAttention(8, 2), c=Fused(8, 8, 8, 2)))
    model['d'] = DerivedAttention(8, 2)
    for name in 'ef':
        model[name] = SpatialReductionAttention(8, 2, sr_ratio=2)
    mmgate.swap_attention(model, dict(path='f', type='AgentAttention', map_size=(2, 2), agent_num=4))
    mmgate.swap_attention(model, dict(path=['b.attn', 'c'], type='PLuGMultiheadAttention'))
    rows = {row.path: row for row in list_attention(model)}
    assert {path: (row.class_name, row.gate) for path, row in rows.items()} == {
        'a': ('MultiheadAttention', None),
        'b.attn': ('MultiheadAttention', 'PLuGGate'),
        'c': ('BiMultiHeadAttention', 'PLuGGate'),
        'd': ('DerivedAttention', None),
        'd.attn': ('MultiheadAttention', None),
        'e': ('SpatialReductionAttention', None),
        'f': ('SpatialReductionAttention', 'AgentGate'),
    }
    assert {path for path, row in rows.items() if row.gates} == {'a', 'd.attn', 'e'}
    with pytest.raises(
        ConfigError, match=r'\n  a: mmcv\.\S+\.MultiheadAttention, fits: .*\n  b\.attn: \S+, gated by PLuGGate'
    ):
        mmgate.swap_attention(model, dict(path='x', type='PLuGMultiheadAttention'))


@pytest.mark.parametrize(
    'config, message',
    [
        (dict(default_scope='mmdet'), 'has no model'),
        (dict(model=dict(type='RetinaNet', backbone=None, neck=1)), "cannot be built: .*'bbox_head'"),
        (dict(model=dict(type='NoSuchNet')), 'cannot be built: .*NoSuchNet'),
    ],
    ids=['no model', 'no argument', 'no class'],
)
def test_a_config_that_cannot_be_built_is_refused(config: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_structure(Config(config))


def test_what_does_not_fit_all_alike_is_pasted_for_one() -> None:
    layers = [MultiheadAttention(8, 2), nn.Linear(2, 2)]
    model = nn.ModuleDict(dict(a=nn.ModuleList(layers), b=nn.ModuleList([MultiheadAttention(8, 2)])))
    texts = rules_to_paste(model, list_attention(model))
    gate = texts['a.0'].partition('=')[2]
    assert gate in MODELS and texts == {'a.0': f'a.0={gate}', 'b.0': f'b.*={gate}'}


@pytest.mark.parametrize(
    ('config', 'count'),
    [
        ('mm_grounding_dino/grounding_dino_swin-t_pretrain_obj365.py', 60),  # a language model, fairscale
        ('lad/lad_r50-paa-r101_fpn_2xb8_coco_1x.py', 0),  # a teacher
        ('reid/reid_r50_8xb32-6e_mot17train80_test-mot17val20.py', 0),  # a data preprocessor of mmpretrain's classifier
        ('timm_example/retinanet_timm-efficientnet-b1_fpn_1x_coco.py', 0),
    ],
    ids=lambda value: str(value).partition('/')[0],
)
@needs_mmpretrain
def test_parts_that_need_downloads_or_packages_are_left_out(config: str, count: int) -> None:
    assert len(list_attention(build_structure(read_config(f'mmdet::{config}')))) == count
