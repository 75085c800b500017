"""Checkpoints that start a backbone: the authors', ours and of another resolution."""

from __future__ import annotations

import re
import sys
from itertools import cycle
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import filled, needs_mmpretrain
from helpers.backbones import convert_file, swin_state, vit
from helpers.published import agent_pvt, agent_swin, random_pvt, random_swin
from helpers.published_cswin import SMALL, published_cswin, random_cswin
from mmengine.registry import MODELS
from mmengine.runner import load_checkpoint
from torch import Tensor, nn

from mmgate.backbones.convert import convert
from mmgate.backbones.weights import DERIVED
from mmgate.gates.base.map import MapGate

PVT: dict[str, Any] = dict(num_layers=(1, 1, 1, 1), num_heads=(1, 2, 2, 2), embed_dims=16)
SWIN: dict[str, Any] = dict(depths=(1, 1, 1, 1), num_heads=(1, 2, 2, 2), embed_dims=16)
OF_TWO_SIZES: dict[str, dict[str, Any]] = {
    'agent_pvt': dict(type='mmgate.AgentPVT', **PVT),
    'saga_pvt': dict(type='mmgate.SAGAPVT', **PVT),
    'agent_swin': dict(type='mmgate.AgentSwin', blocks=(1, 1, 1, 1), **SWIN),
    'saga_swin': dict(type='mmgate.SAGASwin', blocks=(1, 1, 1, 1), **SWIN),
    'agent_cswin': dict(type='mmgate.AgentCSwin', **SMALL),
}


@pytest.mark.parametrize('name, way', [*zip(OF_TWO_SIZES, cycle(['init_cfg', 'classifier']), strict=False)])
def test_loading_resizes_as_a_forward_pass_does(name: str, way: str, tmp_path: Path) -> None:
    """What is loaded into the larger model computes what the smaller one does on larger images."""
    small = filled(MODELS.build(dict(OF_TWO_SIZES[name], pretrain_img_size=64)), 0.1).eval()
    checkpoint = str(tmp_path / 'small.pth')
    starts = way == 'init_cfg'
    prefix = '' if starts else 'backbone.'
    state = small.state_dict()
    torch.save({'state_dict': {f'{prefix}{key}': value for key, value in state.items()}}, checkpoint)
    large = dict(OF_TWO_SIZES[name], pretrain_img_size=96)
    if starts:
        model = MODELS.build(dict(large, init_cfg=dict(type='Pretrained', checkpoint=checkpoint)))
        model.init_weights()
    else:
        classifier = nn.ModuleDict(dict(backbone=MODELS.build(large)))
        load_checkpoint(classifier, checkpoint, map_location='cpu')  # as tools/test.py does
        model = classifier['backbone']
    assert any(value.shape != small.state_dict()[key].shape for key, value in model.state_dict().items())
    image = torch.randn(1, 3, 96, 96)
    with torch.no_grad():
        for actual, expected in zip(model.eval()(image), small(image), strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@needs_mmpretrain
@pytest.mark.parametrize('kind', [None, 'AgentAttention', 'SAGAAttention'])
def test_a_vit_of_another_resolution_is_resized_on_loading(kind: str | None, tmp_path: Path) -> None:
    """mmpretrain's hook resizes the position embedding, ours what the attention has."""
    rule = kind and dict(type=kind, **(dict(agent_num=4) if kind == 'AgentAttention' else {}))
    small, large = filled(vit(rule, 64), 0.1).eval(), vit(rule, 96).eval()
    torch.save({'state_dict': small.state_dict()}, tmp_path / 'small.pth')
    load_checkpoint(large, str(tmp_path / 'small.pth'), map_location='cpu')
    for gate in small.modules():
        if isinstance(gate, MapGate):
            gate.host_map = (6, 6)  # which a forward pass resizes to
    image = torch.randn(1, 3, 96, 96)
    with torch.no_grad():
        torch.testing.assert_close(large(image), small(image), rtol=1e-4, atol=1e-4)


def test_relative_positions_of_windows_of_another_size_are_resized(tmp_path: Path) -> None:
    """Relative position tables are resized bicubically, as mmdet does, and the index stays the model's own."""
    options = dict(type='mmgate.AgentSwin', blocks=(1, 0, 0, 0), **SWIN)
    small, table = filled(MODELS.build(dict(options)), 0.1), 'stages.1.blocks.0.attn.w_msa.relative_position_bias_table'
    state = {key: value.clone() for key, value in small.state_dict().items()}
    index = table.replace('bias_table', 'index')
    started, loaded = (
        start_from(dict(options, window_size=12), state, tmp_path),
        MODELS.build(dict(options, window_size=12)),
    )
    own = loaded.state_dict()[index].clone()
    loaded.load_state_dict(small.state_dict())
    grid = small.state_dict()[table].t().view(1, 2, 13, 13)
    expected = F.interpolate(grid, size=(23, 23), mode='bicubic').flatten(2)[0].t()
    for large in (started, loaded):
        torch.testing.assert_close(large.state_dict()[table], expected)
        assert torch.equal(large.state_dict()[index], own)
        large.eval()(torch.randn(1, 3, 96, 96))
    assert all(torch.equal(value, state[key]) for key, value in small.state_dict().items())


def start_from(model: dict[str, Any], checkpoint: Any, folder: Path, **options: str) -> nn.Module:
    """Build and initialise as a Runner does, from a file that holds ``checkpoint``."""
    torch.save(checkpoint, folder / 'pretrained.pth')
    init_cfg = dict(type='Pretrained', checkpoint=str(folder / 'pretrained.pth'), **options)
    built = MODELS.build(dict(model, init_cfg=init_cfg))
    built.init_weights()
    return built


def assert_maps_equal(actual: list[Tensor], expected: list[Tensor]) -> None:
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        error = ((a - e).norm() / e.norm()).item()
        assert error < 1e-4, f'stage {i + 1}: relative error {error:.1e}'


TINY = dict(num_layers=(1, 1, 1, 1), drop_path_rate=0.0)
PVT_KEYS = {'block2.0.attn.proj.bias': 'layers.1.1.1.attn.attn.out_proj.bias'}
TABLE = 'blocks.1.attn.{}relative_position_bias_table'
SWIN_KEYS = {'layers.0.blocks.1.attn.qkv.weight': 'stages.0.blocks.1.attn.w_msa.qkv.weight'}
SWIN_KEYS[f'layers.3.{TABLE.format("")}'] = f'stages.3.{TABLE.format("w_msa.")}'


@pytest.mark.parametrize(
    'kind, options, keys, converted',
    [
        ('AgentPVT', TINY, PVT_KEYS, False),
        ('SAGAPVT', TINY, PVT_KEYS, True),
        ('AgentSwin', dict(arch='tiny'), SWIN_KEYS, True),
        ('SAGASwin', dict(arch='tiny'), SWIN_KEYS, False),
        ('AgentCSwin', SMALL, {'stage2.1.qkv.weight': 'stages.1.1.attn.qkv.weight'}, False),
    ],
)
def test_a_vanilla_checkpoint_fills_what_is_shared(
    tmp_path: Path, kind: str, options: dict[str, Any], keys: dict[str, str], converted: bool
) -> None:
    """The convolutions of a vanilla CSwin block's two branches have no place in one with agents."""
    vanilla = random_cswin(False) if 'CSwin' in kind else random_swin([2, 2, 6, 2], (0, 0, 0, 0), ())
    state = random_pvt([1, 1, 1, 1], ()) if 'PVT' in kind else vanilla
    found = start_from(
        dict(type=f'mmgate.{kind}', **options), {'state_dict': convert(state) if converted else state}, tmp_path
    ).state_dict()
    same = {ours: state[theirs] for theirs, ours in keys.items()}
    if 'PVT' in kind:
        same['layers.3.1.0.pos_embed'] = state['pos_embed4'][:, 1:]
        joint = [state[f'block2.0.attn.{part}.weight'] for part in ('q', 'kv')]
        same['layers.1.1.1.attn.attn.in_proj_weight'] = torch.cat(joint)
    assert all(torch.equal(found[name], value) for name, value in same.items())


@pytest.mark.parametrize(
    'kind, layout, size, converted',
    [
        ('pvt', 'model', (224, 224), False),
        ('pvt', 'bare', (96, 64), True),
        ('pvt', 'detector', (256, 320), True),
        ('swin', 'state_dict', (224, 224), True),
        ('swin', 'model', (90, 90), True),
        ('swin', 'detector', (256, 320), False),
        ('swin_without_stage_1', 'detector', (96, 64), True),
        ('cswin', 'model', (224, 448), False),
    ],
    ids=str,
)
def test_published_agents_start_a_backbone(
    tmp_path: Path, kind: str, layout: str, size: tuple[int, int], converted: bool
) -> None:
    """The authors' file as it is, with their training script's configuration of a package that is not here."""
    x, dense, model = torch.randn(1, 3, *size), layout == 'detector', dict[str, Any](drop_path_rate=0.0)
    if kind == 'pvt':
        state, agents = random_pvt([2, 2, 2, 2], (9, 16, 49, 49), classifier=not dense), (144, 256, 784, 784)
        expected = agent_pvt(state, x, [2, 2, 2, 2], agents)
        model.update(type='mmgate.AgentPVT')
    elif kind == 'cswin':
        state, agents = random_cswin(True), (9, 16, None, None)
        expected = [published_cswin(state, x, (1, 2, 7, 7))]
        model.update(type='mmgate.AgentCSwin', out_indices=(3,), **SMALL)
    else:
        state, agents = swin_state(classifier=not dense), (81, 144, 196, 49)
        expected = agent_swin(state, x, [2, 2, 6, 2], agents, dense=dense)
        model.update(type='mmgate.AgentSwin', pad_small_map=dense)
    if kind == 'swin_without_stage_1':
        model['out_indices'], expected = (1, 2, 3), expected[1:]
    if layout == 'model':  # what a backbone derives may be missing
        state = {key: value for key, value in state.items() if not key.endswith(DERIVED)}
    foreign = ModuleType('yacs_that_is_not_installed')
    foreign.CfgNode = type('CfgNode', (dict,), {'__module__': foreign.__name__})
    sys.modules[foreign.__name__] = foreign
    named = {f'backbone.{key}': value for key, value in state.items()} if dense else state
    besides = {'config': foreign.CfgNode(lr=[1]), 'epoch': 299, 'rates': {1: torch.ones(1)}}
    checkpoint = named if layout == 'bare' else {'state_dict' if dense else layout: named, **besides}
    file = tmp_path / 'max_acc.pth'
    torch.save(checkpoint, file)
    del sys.modules[foreign.__name__]
    if converted:
        assert convert_file(file, tmp_path / 'converted.pth') == 0
        file = tmp_path / 'converted.pth'
    built = MODELS.build(dict(model, agent_nums=agents, init_cfg=dict(type='Pretrained', checkpoint=str(file))))
    built.init_weights()
    with torch.no_grad():
        assert_maps_equal(built.eval()(x), expected)


@pytest.mark.parametrize('name, outputs', zip(OF_TWO_SIZES, cycle([(0, 1, 2, 3), (3,)]), strict=False))
def test_own_checkpoint_starts_a_backbone(tmp_path: Path, name: str, outputs: tuple[int, ...]) -> None:
    """A detector's or a classifier's; the output norms that a Swin classifier lacks keep their start."""
    trained = filled(MODELS.build(dict(OF_TWO_SIZES[name], out_indices=outputs)), 1.0)
    state = {f'ema.backbone.{k}': v for k, v in trained.state_dict().items()} | {'backbone.fc.bias': torch.ones(6)}
    checkpoint = {'state_dict': state, 'meta': {'when': Path('now')}}
    built = start_from(OF_TWO_SIZES[name], checkpoint, tmp_path, prefix='ema.backbone.').state_dict()
    assert all(torch.equal(built[key], value) for key, value in trained.state_dict().items())


FAULTS = [
    (dict(blocks=(2, 2, 2, 0)), dict(blocks=(2, 2, 6, 0)), 'missing: stages.2.blocks.2.attn.gate.an_bias'),
    (dict(blocks=(2, 2, 6, 0)), dict(blocks=(2, 2, 2, 0)), 'unknown: stages.2.blocks.2.attn.gate.an_bias'),
    (dict(), dict(pretrain_agent_nums=(9, 9, 49, 49)), 'size mismatch for stages.1.blocks.0.attn.gate.an_bias'),
    (dict(), dict(type='mmgate.SAGASwin'), 'size mismatch for stages.0.blocks.0.attn.gate.dwc.weight'),
]
# by backbone, its options and where the authors have a part of the agents, and we
AGENTS_OF: dict[str, tuple[dict[str, Any], str, str]] = {
    'AgentPVT': (TINY, 'block2.0.attn.', 'layers.1.1.1.attn.gate.'),
    'AgentSwin': ({}, 'layers.1.blocks.0.attn.', 'stages.1.blocks.0.attn.gate.'),
    'AgentCSwin': (SMALL, 'stage2.1.attns.0.', 'stages.1.1.attn.gate.'),
}


def test_agents_fill_all_or_are_refused(tmp_path: Path) -> None:
    """A published file with the rest of their parameters is not taken for a vanilla one."""
    base = dict(type='mmgate.AgentSwin', arch='tiny')
    for trained, model, fault in FAULTS:
        with pytest.raises(ValueError, match=re.escape(fault)):
            start_from({**base, **model}, MODELS.build({**base, **trained}).state_dict(), tmp_path)
    states = random_pvt([1, 1, 1, 1], (9, 16, 49, 49)), swin_state(), random_cswin(True)
    for (kind, (options, theirs, ours)), state in zip(AGENTS_OF.items(), states, strict=True):
        for lost in ('na_bias', 'wa_bias', 'dwc.weight'):
            part = lost.replace('dwc', 'get_v') if kind == 'AgentCSwin' else lost
            given = {key: value for key, value in state.items() if key != theirs + part}
            assert len(given) == len(state) - 1
            with pytest.raises(ValueError, match=rf'keys by its names\):\n  missing: {re.escape(ours + lost)}\n\S'):
                start_from(dict(type=f'mmgate.{kind}', **options), given, tmp_path)


def test_init_cfg_of_another_kind_is_refused() -> None:
    for init_cfg in (dict(type='TruncNormal'), dict(type='Pretrained')):
        with pytest.raises(ValueError, match=r"init_cfg of AgentPVT must be None or dict\(type='Pretrained'"):
            MODELS.build(dict(OF_TWO_SIZES['agent_pvt'], init_cfg=init_cfg)).init_weights()
