"""Structures of configs without their weights, for every config of mmdet and mmseg, and the rules to paste."""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from mmcv.cnn.bricks.transformer import MultiheadAttention
from mmengine.config import Config
from mmengine.hub import get_config
from torch import nn

import mmgate
from mmgate.analysis.structure import Attention, build_structure, list_attention, rules_to_paste
from mmgate.errors import ConfigError
from mmgate.mm.config_file import read_config
from mmgate.registry import MODELS
from mmgate.rules import read_rules

DENSE = {'PLuGMultiheadAttention', 'SDPAGatedMultiheadAttention', 'DifferentialGatedMultiheadAttention'}
MAP = {'AgentAttention', 'SAGAAttention'}


def attention(config: str) -> dict[str, Attention]:
    return {row.path: row for row in list_attention(build_structure(get_config(config)))}


@pytest.mark.parametrize(
    'config, path, gates',
    [
        ('mmdet::swin/mask-rcnn_swin-t-p4-w7_fpn_1x_coco.py', 'backbone.stages.0.blocks.0.attn', MAP),
        ('mmdet::swin/mask-rcnn_swin-t-p4-w7_fpn_1x_coco.py', 'backbone.stages.0.blocks.0.attn.w_msa', DENSE),
        ('mmdet::pvt/retinanet_pvt-t_fpn_1x_coco.py', 'backbone.layers.0.1.1.attn', DENSE | MAP),
        ('mmseg::vit/vit_vit-b16_mln_upernet_8xb2-80k_ade20k-512x512.py', 'backbone.layers.0.attn', DENSE),
        ('mmseg::segformer/segformer_mit-b0_8xb2-160k_ade20k-512x512.py', 'backbone.layers.0.1.0.attn', DENSE | MAP),
        ('mmdet::detr/detr_r50_8xb2-150e_coco.py', 'encoder.layers.0.self_attn', DENSE),
    ],
    ids=['swin', 'windows', 'pvt', 'vit', 'mit', 'detr'],
)
def test_a_structure_has_the_attention_that_gates_fit(config: str, path: str, gates: set[str]) -> None:
    """The backbones' constructors read drop path rates off a tensor, which one without values refuses."""
    row = attention(config)[path]
    assert gates <= set(row.gates)
    assert bool(MAP & gates) == bool(MAP & set(row.gates)) and bool(DENSE & gates) == bool(DENSE & set(row.gates))


def test_a_structure_takes_no_memory() -> None:
    model = build_structure(get_config('mmdet::swin/mask-rcnn_swin-t-p4-w7_fpn_1x_coco.py'))
    real = sum(p.numel() for p in model.parameters() if p.device != torch.device('meta'))
    assert real < 0.01 * sum(p.numel() for p in model.parameters())


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


@pytest.mark.parametrize(
    'config',
    [
        'mmdet::deformable_detr/deformable-detr_r50_16xb2-50e_coco.py',
        'mmdet::swin/mask-rcnn_swin-t-p4-w7_fpn_1x_coco.py',
        'mmdet::pvt/retinanet_pvt-t_fpn_1x_coco.py',
        'mmseg::vit/vit_vit-b16_mln_upernet_8xb2-80k_ade20k-512x512.py',
        'mmseg::mask2former/mask2former_swin-t_8xb2-160k_ade20k-512x512.py',
    ],
)
def test_what_can_be_pasted_gates_the_module(config: str) -> None:
    """Every text gates the module of its line, and those alike."""
    cfg = get_config(config)
    model = build_structure(cfg)
    texts = rules_to_paste(model, list_attention(model))
    assert texts
    for text in dict.fromkeys(texts.values()):
        gated = mmgate.swap_attention(model, read_rules(text))
        assert set(gated) >= {path for path, of in texts.items() if of == text}
        assert not set(rules_to_paste(model, list_attention(model))) & set(gated)
        mmgate.restore_attention(model)


def test_what_does_not_fit_all_alike_is_pasted_for_one() -> None:
    layers = [MultiheadAttention(8, 2), nn.Linear(2, 2)]
    model = nn.ModuleDict(dict(a=nn.ModuleList(layers), b=nn.ModuleList([MultiheadAttention(8, 2)])))
    texts = rules_to_paste(model, list_attention(model))
    gate = texts['a.0'].partition('=')[2]
    assert gate in MODELS and texts == {'a.0': f'a.0={gate}', 'b.0': f'b.*={gate}'}


# What keeps a config of the zoos from being read: what is not installed where the tests run, ...
NEEDS = r'mmpretrain|lap is not installed|transformers is not installed|fairscale|Detectron2|VPD model'
# ... that it is no model's, ...
NO_MODEL = r'/(common/|.*_tta\.py|.*odinw/override_category\.py)'
# ... and faults of the zoos: a base that does not exist, a class or an argument that is not there any more, a teacher's
# config looked for in a checkout, SyncBN that is built in a process group alone.
FAULTY = {
    r'/bytetrack/.*mot17test\.py|/sort/': 'FileNotFoundError',
    r'/ld/': 'FileNotFoundError',
    r'/cascade_rpn/cascade-rpn_': "'num_classes'",
    r'/clrnet/': 'LineDetDataProcessor',
    r'/v3det/fcos_': "'force_grad_on_level'",
    r'/(simple_copy_paste|strong_baselines)/.*syncbn': 'Default process group',
}
# No structure differs in these.
VALUES = {'data_preprocessor', 'init_cfg', 'pretrained', 'num_classes', 'train_cfg', 'test_cfg', 'sampler'}


def structural(node: Any) -> Any:
    if isinstance(node, Mapping):
        kept = {k: v for k, v in node.items() if k not in VALUES and not str(k).startswith('loss')}
        return {key: structural(value) for key, value in kept.items()}
    return [structural(value) for value in node] if isinstance(node, (list, tuple)) else node


def excused(name: str, error: Exception) -> bool:
    reason = str(error)
    if 'has no model' in reason:
        return re.search(NO_MODEL, name) is not None
    fault = any(re.search(path, name) and part in reason for path, part in FAULTY.items())
    return fault or re.search(NEEDS, reason) is not None


@pytest.mark.slow
@pytest.mark.parametrize('package', ['mmdet', 'mmseg'])
def test_every_config_of_the_zoo_has_a_structure(package: str) -> None:
    logging.getLogger('mmengine').setLevel(logging.ERROR)
    zoo = Path(importlib.import_module(package).__file__ or '').parent / '.mim/configs'
    seen, failed = set(), {}
    for path in sorted(zoo.rglob('*.py')):
        if '_base_' in path.parts:
            continue
        try:
            cfg = read_config(str(path))
            structure = repr(structural(cfg.get('model')))
            if structure not in seen:
                seen.add(structure)
                list_attention(build_structure(cfg))
        except (ConfigError, ImportError) as error:
            if not excused(str(path), error):
                failed[str(path.relative_to(zoo))] = error
    assert len(seen) > 200
    assert not failed
