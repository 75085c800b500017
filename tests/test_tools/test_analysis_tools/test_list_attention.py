"""The list of a model's attention: its rows and the gates that fit."""

from __future__ import annotations

import pytest
from conftest import tool
from mmcv.cnn.bricks.transformer import MultiheadAttention
from mmdet.models.backbones.pvt import SpatialReductionAttention
from mmdet.models.utils.vlfuse_helper import BiMultiHeadAttention as Fused
from mmengine.registry import MODELS
from torch import nn

import mmgate
from mmgate.analysis.structure import list_attention
from mmgate.errors import ConfigError

PLUGGED = 'PLuGMultiScaleDeformableAttention'
PLUG = 'plug/deformable_detr/plug-deformable-detr-refine_r50_8xb4-50e_coco.py'


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    tool('list_attention').main(['mmdet::deformable_detr/deformable-detr_r50_16xb2-50e_coco.py'])
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    pasted = "--gate 'encoder.layers.*.self_attn=PLuGMultiScaleDeformableAttention'"
    assert f'  MultiScaleDeformableAttention, {PLUGGED}  ' in rows['encoder.layers.0.self_attn']
    assert rows['encoder.layers.0.self_attn'].endswith(f'  {pasted}')
    assert 'num_levels=4' in rows['encoder.layers.0.self_attn']
    assert 'PLuGMultiheadAttention, SDPAGatedMultiheadAttention' in rows['decoder.layers.0.self_attn']
    assert 'decoder.layers.0.self_attn.attn' not in rows


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
    assert {path: (row.class_name, row.gate) for path, row in rows.items()} == {
        'a': ('MultiheadAttention', 'PLuGGate'),
        'b': ('MultiheadAttention', None),
        'c.attn': ('MultiheadAttention', 'PLuGGate'),
        'd': ('BiMultiHeadAttention', 'PLuGGate'),
        'e': ('DerivedAttention', None),
        'e.attn': ('MultiheadAttention', None),
        'f': ('MultiheadAttention', 'SDPAGate'),
        'g': ('SpatialReductionAttention', None),
        'h': ('SpatialReductionAttention', 'AgentGate'),
    }
    assert {path for path, row in rows.items() if row.gates} == {'b', 'e.attn', 'g'}
    with pytest.raises(ConfigError, match=r'\n  a: mmcv\.\S+\.MultiheadAttention, gated by PLuGGate\n  b: mmcv'):
        mmgate.swap_attention(model, dict(path='x', type='PLuGMultiheadAttention'))
