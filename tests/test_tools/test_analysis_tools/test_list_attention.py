"""What attention a model has and what fits it, for every config of mmdet and mmseg."""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import over_shapes, tool
from mmcv.cnn.bricks.transformer import MultiheadAttention
from mmdet.models.backbones.pvt import SpatialReductionAttention
from mmdet.models.utils.vlfuse_helper import BiMultiHeadAttention as Fused
from mmengine.config import Config
from mmengine.hub import get_config
from mmengine.registry import MODELS
from shapes import write_shapes
from torch import nn

import mmgate
from mmgate.analysis.structure import Attention, build_structure, list_attention, rules_to_paste
from mmgate.errors import ConfigError
from mmgate.rules import read_rules
from mmgate.train import cli
from mmgate.train.config_file import read_config

DENSE = {'PLuGMultiheadAttention', 'SDPAGatedMultiheadAttention', 'DifferentialGatedMultiheadAttention'}
MAP = {'AgentAttention', 'SAGAAttention'}
PLUGGED = 'PLuGMultiScaleDeformableAttention'
PLUG = 'plug/deformable_detr/plug-deformable-detr-refine_r50_8xb4-50e_coco.py'


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
def test_transformers(config: str, path: str, gates: set[str]) -> None:
    """The backbones' constructors read drop path rates off a tensor, which one without values refuses."""
    row = attention(config)[path]
    assert gates <= set(row.gates)
    assert bool(MAP & gates) == bool(MAP & set(row.gates)) and bool(DENSE & gates) == bool(DENSE & set(row.gates))


def test_takes_no_memory() -> None:
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
def test_refuses(config: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_structure(Config(config))


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    tool('list_attention').main(['mmdet::deformable_detr/deformable-detr_r50_16xb2-50e_coco.py'])
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    pasted = "--gate 'encoder.layers.*.self_attn=PLuGMultiScaleDeformableAttention'"
    assert f'  MultiScaleDeformableAttention, {PLUGGED}  ' in rows['encoder.layers.0.self_attn']
    assert rows['encoder.layers.0.self_attn'].endswith(f'  {pasted}')
    assert 'num_levels=4' in rows['encoder.layers.0.self_attn']
    assert 'PLuGMultiheadAttention, SDPAGatedMultiheadAttention' in rows['decoder.layers.0.self_attn']
    assert 'decoder.layers.0.self_attn.attn' not in rows


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


@pytest.mark.parametrize(
    ('config', 'first', 'rank'),
    [
        ('_base_/deformable-detr-refine_r18_1xb8-12e_shapes.py', '--gate ', '-'),
        ('saga/mask_rcnn/saga-mask-rcnn_swin-demo_1xb8-8e_shapes.py', '--gate ', '0.'),
    ],
    ids=['deformable', 'linear'],
)
def test_figures_of_a_model_on_images(
    config: str, first: str, rank: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every attention has a line, those that move most first; each is named as rules name it."""
    write_shapes(tmp_path / 'shapes', num_train=1, num_val=1, size=64)
    (tmp_path / 'config.py').write_text(over_shapes(f'configs/{config}', tmp_path / 'shapes'))
    measured = ['--measure', 'untrained', '--max-images', '1']
    assert cli.main(tool('list_attention').main, [str(tmp_path / 'config.py'), *measured]) == 0
    table, note = capsys.readouterr().out.rsplit('path  ', 1)[1].rsplit('\n\n', 1)
    assert note.startswith('The further up, ') and note.count('. ') == 0
    rows = [line.split() for line in table.splitlines()[1:]]
    paths = {row.path for row in list_attention(build_structure(read_config(str(tmp_path / 'config.py'))))}
    assert {row[0] for row in rows} <= paths and len(rows) > 3
    moved = [float(row[2]) + float(row[3]) if row[2] != '-' else -1.0 for row in rows]
    assert moved == sorted(moved, reverse=True) and moved[0] > 0 and first in table
    assert any(row[7].startswith(rank) for row in rows)


def test_what_does_not_fit_all_alike_is_pasted_for_one() -> None:
    layers = [MultiheadAttention(8, 2), nn.Linear(2, 2)]
    model = nn.ModuleDict(dict(a=nn.ModuleList(layers), b=nn.ModuleList([MultiheadAttention(8, 2)])))
    texts = rules_to_paste(model, list_attention(model))
    assert texts == {'a.0': 'a.0=PLuGMultiheadAttention', 'b.0': 'b.*=PLuGMultiheadAttention'}


def test_a_gated_module_is_named_by_its_host_and_its_gate(capsys: pytest.CaptureFixture[str]) -> None:
    tool('list_attention').main([f'mmgate::{PLUG}'])
    rows = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()}
    for path in ('encoder.layers.0.self_attn', 'decoder.layers.1.cross_attn'):
        kind, *sizes, gated, by, gate = rows[path]
        assert kind == 'MultiScaleDeformableAttention' and 'num_levels=4' in ' '.join(sizes)
        assert (gated, by, gate) == ('gated', 'by', 'PLuGDeformableGate')
    assert not any(path.endswith('.gate') for path in rows)


class DerivedAttention(MultiheadAttention):
    """No rule fits it, but the module in it."""


def test_an_attention_has_one_row_by_the_path_that_a_rule_takes() -> None:
    model = nn.ModuleDict({name: MultiheadAttention(8, 2) for name in 'abc'})
    model['d'] = Fused(8, 8, 8, 2)
    model['e'] = DerivedAttention(8, 2)
    model['f'] = MODELS.build(dict(type='mmgate.SDPAGatedMultiheadAttention', embed_dims=8, num_heads=2))
    model['g'] = SpatialReductionAttention(8, 2, sr_ratio=2)
    model['h'] = SpatialReductionAttention(8, 2, sr_ratio=2)
    mmgate.swap_attention(model, dict(path='h', type='AgentAttention', map_size=(2, 2), agent_num=4))
    mmgate.swap_attention(model, dict(path=['a', 'c.attn', 'd'], type='PLuGMultiheadAttention'))
    rows = {row.path: row for row in list_attention(model)}
    assert {path: (row.kind, row.gate) for path, row in rows.items()} == {
        'a': ('MultiheadAttention', 'PLuGGate'),
        'b': ('MultiheadAttention', None),
        'c.attn': ('MultiheadAttention', 'PLuGGate'),
        'd': ('BiMultiHeadAttention', 'PLuGGate'),
        'e': ('DerivedAttention', None),
        'e.attn': ('MultiheadAttention', None),
        'f': ('SDPAGatedMultiheadAttention', 'SDPAGate'),
        'g': ('SpatialReductionAttention', None),
        'h': ('SpatialReductionAttention', 'AgentGate'),
    }
    assert {path for path, row in rows.items() if row.gates} == {'b', 'e.attn', 'g'}
    with pytest.raises(ConfigError, match=r'\n  a: mmcv\.\S+\.MultiheadAttention, gated by PLuGGate\n  b: mmcv'):
        mmgate.swap_attention(model, dict(path='x', type='PLuGMultiheadAttention'))


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
def test_reads_every_config_of_the_zoo(package: str) -> None:
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
