"""``--gate`` on configs of every package: the model is gated, files stay, and the dumped config builds the same."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, needs_mmpretrain
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
from torch import nn

from mmgate.adapter import gated_modules
from mmgate.errors import ConfigError
from mmgate.mm.config_file import config_parser, read_config
from mmgate.mm.gate_options import add_gate_options, configured, put_gates
from mmgate.mm.speedups import speed_up

DETR = 'mmdet::detr/detr_r50_8xb2-150e_coco.py'
PVT = 'mmdet::pvt/retinanet_pvt-t_fpn_1x_coco.py'
NEW_STYLE = """
from mmengine.config import read_base

with read_base():
    from .base import *

from mmdet.models import DETR

model.update(dict(type=DETR))
"""
COMPOSED = """
_base_ = ['./model.py', './rest.py']
custom_imports = dict(imports=['mmdet.models'], allow_failed_imports=False)
model = dict(num_queries=7)
"""
SEMI = """
_base_ = './detector.py'
model = dict(_delete_=True, type='SemiBaseDetector', detector={{_base_.model}}, semi_train_cfg=dict())
"""


def write(folder: Path, style: str) -> str:
    """Write a config in a style into a folder, beside the files that it inherits, and return its path."""
    cfg = read_config(PVT if style == 'inside' else DETR)
    cfg.model.backbone.init_cfg = None
    model = f'model = {cfg.model.to_dict()!r}\n'
    files = {
        'new style': {'base.py': f'default_scope = "mmdet"\n{model}', 'config.py': NEW_STYLE},
        'composed': {'model.py': model, 'rest.py': "default_scope = 'mmdet'\n", 'config.py': COMPOSED},
        'inside': {'detector.py': f"default_scope = 'mmdet'\n{model}", 'config.py': SEMI},
    }[style]
    for name, text in files.items():
        (folder / name).write_text(text)
    return str(folder / 'config.py')


def gated_in(cfg: Config) -> dict[str, str]:
    """Return the names of the gated modules of a config's model, and their gates."""
    init_default_scope(cfg.get('default_scope') or 'mmdet')
    # Hosts write into the config that they are built from.
    model: nn.Module = MODELS.build(deepcopy(cfg.model))
    return {name: type(module.gate).__name__ for name, module in gated_modules(model)}


ATTENTION = 'layers.*.self_attn=SDPAGatedMultiheadAttention'
CONFIGS = {
    'mmdet': (DETR, f'encoder.{ATTENTION}', 6),
    'mmseg': ('mmseg::segformer/segformer_mit-b0_8xb2-160k_ade20k-512x512.py', 'backbone.**=PLuGMultiheadAttention', 8),
    'mmpretrain': ('mmpretrain::deit/deit-tiny_4xb256_in1k.py', 'backbone.**=PLuGMultiheadAttention', 12),
    'ours': (
        str(ROOT / 'configs/plug/deformable_detr/plug-deformable-detr-refine_r18_1xb8-12e_shapes.py'),
        'decoder.layers.*.self_attn=PLuGMultiheadAttention',
        6,
    ),
    'new style': ('', f'encoder.{ATTENTION}', 6),
    'composed': ('', f'encoder.{ATTENTION}', 6),
    'inside': ('', '*.backbone.**=PLuGMultiheadAttention', 16),
}


@pytest.mark.parametrize(
    'style', [pytest.param(name, marks=needs_mmpretrain if name == 'mmpretrain' else ()) for name in CONFIGS]
)
def test_any_config_is_gated_and_its_dump_builds_the_same(style: str, tmp_path: Path) -> None:
    config, gate, count = CONFIGS[style]
    config = config or write(tmp_path, style)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    parser = config_parser('')
    add_gate_options(parser)
    cfg = configured(parser.parse_args([config, '--gate', gate, '--train', 'gates']))
    for part in (cfg.model.get('backbone'), cfg.model.get('decode_head')):
        if part:
            part.init_cfg = None
    gated = gated_in(cfg)
    assert len(gated) == count and cfg.model.train == 'gates'
    assert {path: path.read_bytes() for path in tmp_path.iterdir() if path in before} == before
    cfg.dump(str(tmp_path / 'dumped.py'))
    again = Config.fromfile(str(tmp_path / 'dumped.py'))
    assert gated_in(again) == gated and 'mmgate' in again.custom_imports['imports']


def args(*argv: str) -> argparse.Namespace:
    parser = config_parser('')
    add_gate_options(parser)
    return parser.parse_args([DETR, *argv])


def test_rules_join_those_of_the_config() -> None:
    cfg = configured(args())
    put_gates(cfg, ['a=PLuGMultiheadAttention'])
    put_gates(cfg, ['b=PLuGMultiheadAttention; c=SDPAGatedMultiheadAttention', 'd=PLuGMultiheadAttention'])
    assert [rule.path for rule in cfg.model.attention] == ['a', 'b', 'c', 'd']
    assert (cfg.model.type, cfg.model.host) == ('mmgate.Gated', 'DETR')
    assert cfg.custom_imports == dict(imports=['mmgate'], allow_failed_imports=False)


@pytest.mark.parametrize(
    ('imports', 'now'),
    [('mmpretrain.models', ['mmgate', 'mmpretrain.models']), (['a', 'mmgate.gates'], ['a', 'mmgate.gates'])],
)
def test_imports_of_the_config_stay(imports: str | list[str], now: list[str]) -> None:
    cfg = Config(dict(model=dict(type='M'), custom_imports=dict(imports=imports, allow_failed_imports=True)))
    put_gates(cfg, ['a=PLuGMultiheadAttention'])
    found = cfg.custom_imports['imports']
    assert ([found] if isinstance(found, str) else found) == now and cfg.custom_imports['allow_failed_imports']


GATES_CONSTRUCTOR, MERGED = 'mmgate.GateOptimWrapperConstructor', 'mmgate.GroupedOptimWrapperConstructor'


@pytest.mark.parametrize(
    ('wrapper', 'paramwise'),
    [
        (dict(optimizer=dict(type='SGD')), None),
        (dict(optimizer=dict(type='SGD'), paramwise_cfg=dict(norm_decay_mult=0.0)), dict(norm_decay_mult=0.0)),
        (
            dict(optimizer=dict(type='SGD'), constructor='LayerDecay', paramwise_cfg=dict(num_layers=12)),
            dict(num_layers=12, constructor='LayerDecay'),
        ),
        (dict(optimizer=dict(type='SGD'), constructor=MERGED), None),
        (
            dict(optimizer=dict(type='SGD'), constructor=MERGED, paramwise_cfg=dict(grouped='LayerDecay')),
            dict(constructor='LayerDecay'),
        ),
        (dict(optimizer=dict(type='SGD'), constructor=GATES_CONSTRUCTOR), None),
        (dict(first=dict(optimizer=dict(type='SGD')), constructor='Several'), dict(constructor='Several')),
    ],
    ids=['none', 'settings', 'own', 'merged', 'own, merged', 'gates', 'several optimizers'],
)
@pytest.mark.parametrize('speedups', [False, True])
def test_gates_get_their_parameter_groups_after_any_constructor(
    wrapper: dict[str, Any], paramwise: dict[str, Any] | None, speedups: bool
) -> None:
    """As in a config that names the constructor, with ``--speedups`` and without."""
    cfg = Config(dict(model=dict(type='M'), optim_wrapper=deepcopy(wrapper)))
    put_gates(cfg, ['a=PLuGMultiheadAttention'])
    if speedups:
        speed_up(cfg)
    assert cfg.optim_wrapper.constructor == GATES_CONSTRUCTOR
    assert cfg.optim_wrapper.get('paramwise_cfg') == paramwise


def test_a_config_that_trains_nothing_gets_no_optimizer() -> None:
    cfg = Config(dict(model=dict(type='M')))
    put_gates(cfg, ['a=PLuGMultiheadAttention'])
    assert 'optim_wrapper' not in cfg


def test_without_the_options_nothing_changes() -> None:
    before = configured(args()).to_dict()
    assert configured(args('--train', 'all')).to_dict() == before and 'custom_imports' not in before


@pytest.mark.parametrize(
    ('argv', 'said'),
    [
        (['--train', 'gates'], '--train gates: the model of .* has no gates; give --gate or --gates'),
        (['--gate', 'a=PLuGMultiheadAttention', '--gates', 'x'], '--gates x places its gates; leave --gate away'),
        (['--gate', 'a=Nothing'], '--gate a=Nothing: .* is not registered'),
        (['--gates', 'absent.safetensors'], 'absent.safetensors'),
    ],
)
def test_refuses(argv: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        configured(args(*argv))
    with pytest.raises(ConfigError, match='has no model to gate'):
        put_gates(Config(dict(a=1)), ['a=PLuGMultiheadAttention'])


@pytest.mark.parametrize('rules', [dict, lambda **rule: [rule]], ids=['rule', 'rules'])
def test_rules_of_a_model_that_takes_none(rules: Callable[..., Any]) -> None:
    """mmdet has an unexpected keyword argument. ``--gate`` makes the model gated, and its rules count."""
    cfg = read_config(DETR)
    cfg.model.attention = rules(path='encoder.layers.*.self_attn', type='PLuGMultiheadAttention')
    for train in (None, 'gates'):
        with pytest.raises(ConfigError, match=r"'DETR' takes none: write type='mmgate\.Gated', host='DETR'"):
            put_gates(cfg, [], train=train)
    put_gates(cfg, ['decoder.layers.*.cross_attn=PLuGMultiheadAttention'])
    assert len(cfg.model.attention) == 2 and cfg.model.type == 'mmgate.Gated'
    cfg = Config(dict(model=dict(type='Mine', attention=dict(type='Softmax'))))
    assert put_gates(cfg, []) == ''
