"""``--gate`` on configs of every package: the model is gated, files stay, and the dumped config builds the same."""

from __future__ import annotations

import argparse
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
from mmgate.mm.gate_options import add_gate_options, configured, put_rules
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


def args(*argv: str, config: str = DETR) -> argparse.Namespace:
    parser = config_parser('')
    add_gate_options(parser)
    return parser.parse_args([config, *argv])


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
    'inside': ('', '*.backbone.**=PLuGMultiheadAttention', 16),
}


@pytest.mark.parametrize(
    'style', [pytest.param(name, marks=needs_mmpretrain if name == 'mmpretrain' else ()) for name in CONFIGS]
)
def test_any_config_is_gated_and_its_dump_builds_the_same(style: str, tmp_path: Path) -> None:
    config, gate, count = CONFIGS[style]
    config = config or write(tmp_path, style)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    cfg = configured(args('--gate', gate, '--train', 'gates', config=config))
    for part in (cfg.model.get('backbone'), cfg.model.get('decode_head')):
        if part:
            part.init_cfg = None
    gated = gated_in(cfg)
    assert len(gated) == count and cfg.model.train == 'gates'
    assert {path: path.read_bytes() for path in tmp_path.iterdir() if path in before} == before
    cfg.dump(str(tmp_path / 'dumped.py'))
    again = Config.fromfile(str(tmp_path / 'dumped.py'))
    assert gated_in(again) == gated and 'mmgate' in again.custom_imports['imports']


@pytest.mark.parametrize(
    ('imports', 'now'),
    [
        (None, dict(imports=['mmgate'], allow_failed_imports=False)),
        ('mmpretrain.models', dict(imports=['mmgate', 'mmpretrain.models'], allow_failed_imports=True)),
        (['a', 'mmgate.gates'], dict(imports=['a', 'mmgate.gates'], allow_failed_imports=True)),
    ],
)
def test_rules_join_those_of_a_config_and_its_imports_stay(imports: Any, now: dict[str, Any]) -> None:
    cfg = Config(dict(model=dict(type=nn.Identity)))
    if imports:
        cfg.custom_imports = dict(imports=imports, allow_failed_imports=True)
    put_rules(cfg, ['a=PLuGMultiheadAttention'])
    put_rules(cfg, ['b=PLuGMultiheadAttention; c=SDPAGatedMultiheadAttention', 'd=PLuGMultiheadAttention'])
    assert [rule.path for rule in cfg.model.attention] == ['a', 'b', 'c', 'd']
    assert (cfg.model.type, cfg.model.host) == ('mmgate.Gated', 'torch.nn.modules.linear.Identity')
    assert cfg.custom_imports == now and 'optim_wrapper' not in cfg


SGD, LAYERWISE = dict(optimizer=dict(type='SGD')), dict(constructor='LayerDecay', paramwise_cfg=dict(num_layers=12))
GATES, MERGED = 'mmgate.GateOptimWrapperConstructor', 'mmgate.GroupedOptimWrapperConstructor'


@pytest.mark.parametrize('first', ['--gate', '--speedups'])
@pytest.mark.parametrize(
    ('wrapper', 'settings', 'constructor'),
    [
        (SGD, {}, None),
        (dict(SGD, paramwise_cfg=dict(norm_decay_mult=0.0)), dict(norm_decay_mult=0.0), None),
        (dict(SGD, **LAYERWISE), dict(num_layers=12), 'LayerDecay'),
        (dict(SGD, constructor=GATES), {}, None),
        (dict(first=SGD, constructor='Several'), {}, 'Several'),
    ],
    ids=['none', 'settings', 'own', 'gates', 'several optimizers'],
)
def test_groups_of_parameters_follow_any_constructor(
    wrapper: dict, settings: dict, constructor: str | None, first: str
) -> None:
    """As in a config that names the constructor of gates, whether ``--speedups`` merged groups before or not."""

    def grouped_by(name: str, key: str) -> bool:
        expected = settings | ({key: constructor} if constructor else {})
        return cfg.optim_wrapper.constructor == name and (cfg.optim_wrapper.get('paramwise_cfg') or {}) == expected

    cfg = Config(dict(model=dict(type='M'), optim_wrapper=deepcopy(wrapper)))
    if first == '--speedups':
        speed_up(cfg)
        assert grouped_by(*((GATES, 'constructor') if wrapper.get('constructor') == GATES else (MERGED, 'grouped')))
    put_rules(cfg, ['a=PLuGMultiheadAttention'])
    for _ in range(2):
        assert grouped_by(GATES, 'constructor')
        speed_up(cfg)


@pytest.mark.parametrize('constructor', [None, MERGED])
def test_a_rate_of_gates_brings_the_constructor_that_reads_it(constructor: str | None) -> None:
    options = ['optim_wrapper.paramwise_cfg.custom_keys.mmgate.gates.lr_mult=20']
    options += [f'optim_wrapper.constructor={constructor}'] if constructor else []
    cfg = configured(args('--cfg-options', *options))
    assert cfg.optim_wrapper.constructor == GATES and cfg.custom_imports.imports == ['mmgate']  # a dump runs by itself
    assert cfg.optim_wrapper.paramwise_cfg.custom_keys.mmgate == dict(gates=dict(lr_mult=20))


def test_without_the_options_nothing_changes() -> None:
    assert configured(args('--train', 'all')).to_dict() == read_config(DETR).to_dict()


@pytest.mark.parametrize(
    ('argv', 'said'),
    [
        (['--train', 'gates'], '--train gates: the model of .* has no gates; give --gate or --gates'),
        (['--gate', 'a=PLuGMultiheadAttention', '--gates', 'x'], '--gates x places its gates; leave --gate away'),
        (['--gate', 'a=Nothing'], '--gate a=Nothing: .* is not registered'),
        (['--gates', 'absent.safetensors'], 'absent.safetensors'),
        (['--gate', 'a=PLuGMultiheadAttention', '--cfg-options', 'model='], 'has no model to gate'),
    ],
)
def test_refuses(argv: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        configured(args(*argv))
