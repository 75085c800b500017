"""PVT and Swin with agent and SAGA attention: the published models, sizes, checkpoints, switches."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from conftest import filled, run_python, tool
from helpers.backbones import names_of_0_1
from helpers.published import agent_pvt, agent_swin, random_pvt, random_swin
from helpers.published_cswin import SMALL, random_cswin
from mmengine.registry import init_default_scope
from torch import Tensor, nn

import mmgate
from mmgate.backbones.convert import convert
from mmgate.registry import MODELS
from mmgate.train import cli

TINY = dict(num_layers=(1, 1, 1, 1), drop_path_rate=0.0)
TINY_SWIN = dict(depths=(2, 2, 2, 2), drop_path_rate=0.0)
BACKBONES: dict[str, dict[str, Any]] = {
    'agent_pvt': dict(type='mmgate.AgentPVT', **TINY),
    'agent_pvt_dense': dict(type='mmgate.AgentPVT', agent_nums=(144, 256, 784, 784), **TINY),
    'agent_swin': dict(type='mmgate.AgentSwin', blocks=(2, 2, 1, 0), **TINY_SWIN),
    'saga_pvt': dict(type='mmgate.SAGAPVT', **TINY),
    'saga_pvtv2': dict(type='mmgate.SAGAPVTv2', **TINY),
    'saga_swin': dict(type='mmgate.SAGASwin', blocks=(2, 2, 2, 0), **TINY_SWIN),
}


def build(name: str, **overrides: Any) -> nn.Module:
    return MODELS.build(dict(BACKBONES[name], **overrides))


def swin_state(classifier: bool = False) -> dict[str, Tensor]:
    return random_swin([2, 2, 6, 2], (2, 2, 6, 0), (9, 16, 49, 49), classifier)


def assert_maps_equal(actual: list[Tensor], expected: list[Tensor]) -> None:
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        error = ((a - e).norm() / e.norm()).item()
        assert error < 1e-4, f'stage {i + 1}: relative error {error:.1e}'


def convert_file(src: Path, dst: Path, *options: str) -> int:
    return cli.main(tool('agent_attention', 'model_converters').main, [str(src), str(dst), *options])


def test_converter_refuses_and_keeps_what_exists(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    src, dst = tmp_path / 'src.pth', tmp_path / 'dst.pth'
    torch.save(swin_state(), src)
    dst.write_text('precious')
    assert convert_file(src, dst) == 2 and dst.read_text() == 'precious'
    assert 'exists' in capsys.readouterr().err
    torch.save({'model': {'fc.weight': torch.ones(1)}}, src)
    assert convert_file(src, dst, '--force') == 2 and dst.read_text() == 'precious'
    assert 'Neither the keys of PVT' in capsys.readouterr().err


def start_from(model: dict[str, Any], checkpoint: Any, folder: Path, **options: str) -> nn.Module:
    """Build and initialise as a Runner does, from a file that holds ``checkpoint``."""
    torch.save(checkpoint, folder / 'pretrained.pth')
    init_cfg = dict(type='Pretrained', checkpoint=str(folder / 'pretrained.pth'), **options)
    built = MODELS.build(dict(model, init_cfg=init_cfg))
    built.init_weights()
    return built


@pytest.mark.parametrize('converted', [False, True], ids=['published', 'converted'])
@pytest.mark.parametrize('kind', ['AgentPVT', 'SAGAPVT', 'AgentSwin', 'SAGASwin'])
def test_a_vanilla_checkpoint_fills_what_is_shared(tmp_path: Path, kind: str, converted: bool) -> None:
    if 'PVT' in kind:
        options, state = TINY, random_pvt([1, 1, 1, 1], ())
        block, same = 'block2.0.attn', {'layers.3.1.0.pos_embed': state['pos_embed4'][:, 1:]}
        same['layers.1.1.1.attn.attn.out_proj.bias'] = state[f'{block}.proj.bias']
        joint = torch.cat([state[f'{block}.q.weight'], state[f'{block}.kv.weight']])
        same['layers.1.1.1.attn.attn.in_proj_weight'] = joint
    else:
        options, state = dict(arch='tiny'), random_swin([2, 2, 6, 2], (0, 0, 0, 0), ())
        block, table = 'blocks.1.attn', 'relative_position_bias_table'
        same = {f'stages.0.{block}.w_msa.qkv.weight': state[f'layers.0.{block}.qkv.weight']}
        same[f'stages.3.{block}.w_msa.{table}'] = state[f'layers.3.{block}.{table}']
    checkpoint = {'state_dict': convert(state) if converted else state}
    model = start_from(dict(type=f'mmgate.{kind}', **options), checkpoint, tmp_path)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in same.items())
    assert model.train().training and not any(module.training for module in model.train(False).modules())


@pytest.mark.parametrize('converted', [False, True], ids=['published', 'converted'])
@pytest.mark.parametrize(
    'kind, layout, size',
    [
        ('pvt', 'model', (224, 224)),
        ('pvt', 'bare', (96, 64)),
        ('pvt', 'detector', (256, 320)),
        ('swin', 'state_dict', (224, 224)),
        ('swin', 'model', (90, 90)),
        ('swin', 'detector', (256, 320)),
        ('swin_without_stage_1', 'detector', (96, 64)),
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
    else:
        state, agents = swin_state(classifier=not dense), (81, 144, 196, 49)
        expected = agent_swin(state, x, [2, 2, 6, 2], agents, dense=dense)
        model.update(type='mmgate.AgentSwin', pad_small_map=dense)
    if kind == 'swin_without_stage_1':
        model['out_indices'], expected = (1, 2, 3), expected[1:]
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


@pytest.mark.parametrize('outputs', [(0, 1, 2, 3), (3,)], ids=['detector', 'classifier'])
@pytest.mark.parametrize('name', BACKBONES)
def test_own_checkpoint_starts_a_backbone(tmp_path: Path, name: str, outputs: tuple[int, ...]) -> None:
    """A detector's or a classifier's; the output norms that a Swin classifier lacks keep their start."""
    trained = filled(build(name, out_indices=outputs), 1.0)
    state = {f'ema.backbone.{k}': v for k, v in trained.state_dict().items()} | {'backbone.fc.bias': torch.ones(6)}
    checkpoint = {'state_dict': state, 'meta': {'when': Path('now')}}
    built = start_from(BACKBONES[name], checkpoint, tmp_path, prefix='ema.backbone.').state_dict()
    assert all(torch.equal(built[key], value) for key, value in trained.state_dict().items())


@torch.no_grad()
@pytest.mark.parametrize('way', ['init_cfg', 'load_state_dict'])
@pytest.mark.parametrize('name', BACKBONES)
def test_checkpoint_of_mmgate_0_1_starts_a_backbone(tmp_path: Path, name: str, way: str) -> None:
    """By names that a gated attention had instead of its host's; one that lacks a part of a gate is refused."""
    trained = filled(build(name), 0.1).eval()
    state = names_of_0_1(trained.state_dict())
    assert not any('.gate.' in key or '.in_proj_weight' in key for key in state)
    model = build(name)
    if way == 'init_cfg':
        model = start_from(BACKBONES[name], state, tmp_path)
    else:
        model.load_state_dict(state)
    for key, value in trained.state_dict().items():
        assert torch.equal(model.state_dict()[key], value), key
    x = torch.randn(1, 3, 64, 64)
    for actual, expected in zip(model.eval()(x), trained(x), strict=True):
        assert torch.equal(actual, expected)
    lost = next(key for key in state if key.endswith(('.an_bias', '.position_encoding')))
    del state[lost]
    with pytest.raises((ValueError, RuntimeError), match=re.escape(lost.replace('.attn.', '.attn.gate.'))):
        start_from(BACKBONES[name], state, tmp_path) if way == 'init_cfg' else build(name).load_state_dict(state)


@torch.no_grad()
@pytest.mark.parametrize(
    'kind, partner, options',
    [
        ('AgentPVT', dict(type='mmgate.LinearPVT'), TINY),
        ('SAGAPVTv2', dict(type='mmgate.LinearPVTv2'), TINY),
        ('AgentSwin', dict(type='mmgate.LinearSwin'), TINY_SWIN),
        ('SAGASwin', dict(type='mmgate.LinearSwin'), dict(pad_small_map=False, **TINY_SWIN)),
        ('AgentCSwin', dict(type='mmgate.AgentCSwin', agent_nums=(None,) * 4), SMALL),
    ],
    ids=str,
)
def test_a_backbone_without_its_gates_is_its_vanilla_partner(
    kind: str, partner: dict[str, Any], options: dict[str, Any]
) -> None:
    """It starts with the same numbers, and computes the same once the gates are off: maps smaller than windows, too."""
    models = []
    for cfg in (dict(type=f'mmgate.{kind}'), partner):
        torch.manual_seed(0)
        model = MODELS.build({**cfg, **options})
        model.init_weights()
        models.append(model.eval())
    gated, vanilla = models
    assert any('.gate.' in key for key in gated.state_dict())
    mmgate.restore_attention(gated)
    assert list(gated.state_dict()) == list(vanilla.state_dict())
    assert all(torch.equal(value, vanilla.state_dict()[key]) for key, value in gated.state_dict().items())
    x = torch.randn(1, 3, 32, 64)
    assert all(torch.equal(actual, expected) for actual, expected in zip(gated(x), vanilla(x), strict=True))


def test_what_a_backbone_derives_may_be_missing(tmp_path: Path) -> None:
    state = swin_state(classifier=True)
    model = dict(type='mmgate.AgentSwin', arch='tiny')
    complete = start_from(model, state, tmp_path).state_dict()
    for key in [key for key in state if key.endswith(('relative_position_index', 'attn_mask'))]:
        del state[key]
    torch.testing.assert_close(start_from(model, state, tmp_path).state_dict(), complete, rtol=0, atol=0)


@pytest.mark.parametrize(
    'trained, model, fault',
    [
        (dict(blocks=(2, 2, 2, 0)), dict(blocks=(2, 2, 6, 0)), 'missing: stages.2.blocks.2.attn.gate.an_bias'),
        (dict(blocks=(2, 2, 6, 0)), dict(blocks=(2, 2, 2, 0)), 'unknown: stages.2.blocks.2.attn.gate.an_bias'),
        (dict(), dict(pretrain_agent_nums=(9, 9, 49, 49)), 'size mismatch for stages.1.blocks.0.attn.gate.an_bias'),
        (dict(), dict(type='mmgate.SAGASwin'), 'size mismatch for stages.0.blocks.0.attn.gate.dwc.weight'),
    ],
    ids=['more blocks', 'fewer blocks', 'agents', 'other attention'],
)
def test_agents_fill_all_or_are_refused(
    tmp_path: Path, trained: dict[str, Any], model: dict[str, Any], fault: str
) -> None:
    base = dict(type='mmgate.AgentSwin', arch='tiny')
    with pytest.raises(ValueError, match=re.escape(fault)):
        start_from({**base, **model}, MODELS.build({**base, **trained}).state_dict(), tmp_path)


@pytest.mark.parametrize('lost', ['na_bias', 'wa_bias', 'dwc.weight'])
@pytest.mark.parametrize('kind', ['AgentPVT', 'AgentSwin', 'AgentCSwin'])
def test_a_published_file_without_a_part_of_its_agents_is_refused(tmp_path: Path, kind: str, lost: str) -> None:
    """One with the rest of their parameters is not taken for a vanilla one, beside which gates keep their start."""
    model: dict[str, Any] = dict(type=f'mmgate.{kind}')
    if kind == 'AgentPVT':
        model, state = {**model, **TINY}, random_pvt([1, 1, 1, 1], (9, 16, 49, 49))
        key, name = f'block2.0.attn.{lost}', f'layers.1.1.1.attn.gate.{lost}'
    elif kind == 'AgentSwin':
        state = swin_state()
        key, name = f'layers.1.blocks.0.attn.{lost}', f'stages.1.blocks.0.attn.gate.{lost}'
    else:
        model, state = {**model, **SMALL}, random_cswin(True)
        part = lost.replace('dwc', 'get_v')
        key, name = f'stage2.1.attns.0.{part}', f'stages.1.1.attn.gate.{lost}'
    del state[key]
    with pytest.raises(ValueError, match=rf'keys by its names\):\n  missing: {re.escape(name)}\n\S'):
        start_from(model, state, tmp_path)


def test_init_cfg_of_another_kind_is_refused() -> None:
    for init_cfg in (dict(type='TruncNormal'), dict(type='Pretrained')):
        with pytest.raises(ValueError, match=r"init_cfg of AgentPVT must be None or dict\(type='Pretrained'"):
            build('agent_pvt', init_cfg=init_cfg).init_weights()


def test_backbones_without_mmdet() -> None:
    """mmseg alone: everything imports, and what asks for a backbone of mmdet's classes is told so in one sentence."""
    script = (
        'import sys; sys.modules["mmdet"] = None\n'
        'import mmgate\n'
        'from mmgate.registry import MODELS\n'
        'try:\n'
        '    MODELS.build(dict(type="mmgate.AgentPVT", arch="tiny"))\n'
        'except ImportError as error:\n'
        '    print(error)\n'
    )
    assert "AgentPVT is built on a class of mmdet's" in run_python('-c', script).stdout


SMALL_PVT = dict(
    embed_dims=32, num_layers=[1, 1, 2, 1], num_heads=[1, 2, 4, 8], mlp_ratios=[4, 4, 4, 4], pretrain_img_size=128
)
SMALL_SWIN = dict(embed_dims=32, depths=(2, 2, 2, 1), num_heads=(1, 2, 4, 8), pretrain_img_size=128)


@torch.no_grad()
@pytest.mark.parametrize('kind', ['AgentPVT', 'SAGAPVT', 'AgentSwin', 'SAGASwin'])
def test_backbones_see_padding_about_as_the_hosts_do(kind: str) -> None:
    """No backbone is told where the padding is; its features change at most twice as the host's do."""
    if 'PVT' in kind:
        vanilla, ours = dict(type='PyramidVisionTransformer', **SMALL_PVT), dict(type=f'mmgate.{kind}', **SMALL_PVT)
    else:
        vanilla = dict(type='SwinTransformer', **SMALL_SWIN)
        ours = dict(SMALL_SWIN, type=f'mmgate.{kind}', blocks=(2, 2, 2, 0))
    init_default_scope('mmdet')
    image = torch.randn(1, 3, 96, 96)
    padded = nn.functional.pad(image, (0, 32, 0, 32))
    changes = []
    for cfg in (vanilla, ours):
        torch.manual_seed(0)
        model: Any = MODELS.build(dict(cfg))
        model.init_weights()
        model.eval()
        alone, together = model(image), model(padded)
        changes.append(
            max(
                float((y[..., : x.shape[2], : x.shape[3]] - x).norm() / (x - x.mean((2, 3), keepdim=True)).norm())
                for x, y in zip(alone, together, strict=True)
            )
        )
    assert changes[1] <= 2 * changes[0], f'{changes[1]:.3f}, the host {changes[0]:.3f}'
