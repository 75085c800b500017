"""Sizes by name, block for block, as the papers' tables have them, and options that do not fit."""

from __future__ import annotations

from typing import Any

import pytest
from mmengine.config import Config
from torch import nn

from mmgate.analysis.structure import build_structure
from mmgate.gates import CrossWindowAttention
from mmgate.gates.agent import AgentGate
from mmgate.gates.base.map import MapGate
from mmgate.registry import MODELS


def structure(kind: str, arch: str, **options: Any) -> Any:
    return build_structure(Config(dict(model=dict(type=f'mmgate.{kind}', arch=arch, **options), default_scope='mmdet')))


def gate_of(attention: nn.Module) -> Any:
    return getattr(attention, 'gate', None)


# stages by block: A the new attention over the whole map, w Swin's own windows
EARLY = ('AA', 'AA', 'w' * 18, 'ww')
SWIN = {
    ('AgentSwin', 'tiny'): ('AA', 'AA', 'AAAAAA', 'ww'),
    ('AgentSwin', 'small'): EARLY,
    ('AgentSwin', 'base'): ('AA', 'AA', 'AA' + 'w' * 16, 'ww'),
    ('SAGASwin', 'tiny'): ('AA', 'AA', 'AAAAAA', 'ww'),
    ('SAGASwin', 'small'): ('AA', 'AA', 'A' * 18, 'ww'),
    ('SAGASwin', 'base'): ('AA', 'AA', 'A' * 18, 'ww'),
    ('LinearSwin', 'tiny'): ('AA', 'AA', 'w' * 6, 'ww'),
    ('LinearSwin', 'small'): EARLY,
    ('LinearSwin', 'base'): EARLY,
}


@pytest.mark.parametrize('kind, arch', SWIN)
def test_swin_has_the_blocks_widths_and_agents_of_the_papers(kind: str, arch: str) -> None:
    options = dict(attention=dict(type='FocusedLinearAttention')) if kind == 'LinearSwin' else {}
    stages = structure(kind, arch, **options).stages
    kinds = tuple(''.join('wA'[isinstance(gate_of(b.attn), MapGate)] for b in s.blocks) for s in stages)
    assert kinds == SWIN[kind, arch]
    width, heads = (128, 4) if arch == 'base' else (96, 3)
    for i, stage in enumerate(stages):
        for block in stage.blocks:
            windows, gate = block.attn.w_msa, gate_of(block.attn)
            assert (windows.embed_dims, windows.num_heads) == (width * 2**i, heads * 2**i)
            assert windows.window_size == (7, 7)
            if gate is not None:
                assert (gate.embed_dims, gate.num_heads) == (width * 2**i, heads * 2**i)
                assert gate.map_size == (56 // 2**i, 56 // 2**i)
                assert isinstance(gate, AgentGate) == (kind == 'AgentSwin')
            if isinstance(gate, AgentGate):
                assert gate.grid**2 == gate.pretrain_grid**2 == (9, 16, 49, 49)[i]


PVT = {
    ('AgentPVT', 'tiny'): (2, 2, 2, 2),
    ('AgentPVT', 'small'): (3, 4, 6, 3),
    ('AgentPVT', 'medium'): (3, 4, 18, 3),
    ('AgentPVT', 'large'): (3, 8, 27, 3),
    ('SAGAPVT', 'tiny'): (2, 2, 2, 2),
    ('SAGAPVT', 'small'): (3, 4, 6, 3),
    ('SAGAPVTv2', 'b0'): (2, 2, 2, 2),
    ('SAGAPVTv2', 'b1'): (2, 2, 2, 2),
}


@pytest.mark.parametrize('kind, arch', PVT)
def test_pvt_has_the_blocks_widths_and_agents_of_the_papers(kind: str, arch: str) -> None:
    stages = structure(kind, arch).layers
    assert tuple(sum(hasattr(block, 'attn') for block in blocks) for _, blocks, _ in stages) == PVT[kind, arch]
    for i, (embed, blocks, _) in enumerate(stages):
        assert embed.projection.stride == ((4, 4), (2, 2), (2, 2), (2, 2))[i]
        assert embed.norm.eps == 1e-5  # the authors', where mmdet has the blocks'
        for block in (block for block in blocks if hasattr(block, 'attn')):
            assert block.norm1.eps == 1e-6
            attention = block.attn
            assert attention.embed_dims == (64, 128, 320, 512)[i] // (2 if arch == 'b0' else 1)
            gate = attention.gate
            assert (gate.embed_dims, gate.num_heads) == (attention.embed_dims, attention.num_heads)
            assert attention.num_heads == (1, 2, 5, 8)[i] and gate.map_size == (56 // 2**i, 56 // 2**i)
            assert block.ffn.layers[0].out_channels == (8, 8, 4, 4)[i] * attention.embed_dims
            if kind == 'AgentPVT':
                assert gate.grid**2 == gate.pretrain_grid**2 == (9, 16, 49, 49)[i]


CSWIN = {
    'tiny': ((2, 4, 18, 1), 64, (2, 4, 8, 16)),
    'small': ((3, 6, 29, 2), 64, (2, 4, 8, 16)),
    'base': ((3, 6, 29, 2), 96, (4, 8, 16, 32)),
}


@pytest.mark.parametrize('arch', CSWIN)
def test_cswin_has_the_blocks_widths_and_agents_of_the_papers(arch: str) -> None:
    depths, width, heads = CSWIN[arch]
    stages = structure('AgentCSwin', arch).stages
    assert tuple(len(stage) for stage in stages) == depths
    for i, stage in enumerate(stages):
        for attention in (block.attn for block in stage):
            assert (attention.embed_dims, attention.num_heads) == (width * 2**i, heads[i])
            if i < 2:
                gate = attention.gate
                assert (gate.embed_dims, gate.num_heads) == (width * 2**i, heads[i])
                assert isinstance(gate, AgentGate) and gate.grid**2 == (9, 16)[i]
                assert gate.map_size == (56 // 2**i, 56 // 2**i)
            else:
                assert type(attention) is CrossWindowAttention and attention.split == (7, None)[i - 2]
    vanilla = structure('AgentCSwin', arch, agent_nums=(None,) * 4).stages
    assert [stage[0].attn.split for stage in vanilla] == [1, 2, 7, None]


THREE: dict[str, Any] = dict(num_heads=(1, 2, 5), out_indices=(0, 1, 2))
THREE_PVT = dict(THREE, num_layers=(1, 1, 1), patch_sizes=(4, 2, 2), strides=(4, 2, 2), paddings=(0, 0, 0))
OTHERS: list[tuple[dict[str, Any], list[int | None]]] = [  # agents of every block; None for another attention
    (dict(type='AgentPVT', attention=[{}, {}, {}, dict(type='SoftmaxAttention')]), [9, 9, 16, 16, 49, 49, None, None]),
    (dict(type='AgentPVT', attention=dict(type='AgentAttention', agent_num=4), num_layers=(1, 1, 1, 1)), [4] * 4),
    (dict(type='AgentPVT', attention=dict(type='SAGAAttention')), [None] * 8),
    (dict(type='AgentPVT', mlp_ratios=(8, 8, 4), **THREE_PVT), [9, 16, 49]),
    (dict(type='AgentSwin', depths=(1, 1, 1), embed_dims=20, **THREE), [9, 16, 49]),
    (dict(type='AgentSwin', depths=(1, 1, 3, 1)), [9, 16, 49, 49, 49, None]),
    (dict(type='LinearSwin', depths=(1, 1, 1, 1)), [None] * 4),
]


@pytest.mark.parametrize('config, agents', OTHERS, ids=lambda value: value.get('type') if 'type' in value else None)
def test_defaults_give_way_to_options(config: dict[str, Any], agents: list[int | None]) -> None:
    """To a stage's own type and to other numbers of stages and of blocks."""
    model = MODELS.build(dict(config, type=f'mmgate.{config["type"]}'))
    attentions = [module.attn for module in model.modules() if hasattr(module, 'attn')]
    found = [gate_of(attn) for attn in attentions if type(attn) is not nn.MultiheadAttention]  # PVT's is inside
    assert [gate.grid**2 if isinstance(gate, AgentGate) else None for gate in found] == agents


def test_strides_make_the_maps() -> None:
    model = MODELS.build(dict(type='mmgate.SAGASwin', depths=(1, 1, 1, 1), strides=(4, 2, 1, 2)))
    assert [stage.blocks[0].attn.gate.map_size[0] for stage in model.stages[:3]] == [56, 28, 28]


PARAMETERS = [  # millions at the papers' rounding; SAGA Swin-T comes to 32.6, the paper prints 32
    ('AgentPVT', 'tiny', 512, 11.6),
    ('AgentPVT', 'small', 512, 20.6),
    ('AgentPVT', 'medium', 512, 35.9),
    ('AgentPVT', 'large', 512, 48.7),
    ('AgentSwin', 'tiny', 768, 29),
    ('AgentSwin', 'small', 768, 50),
    ('AgentSwin', 'base', 1024, 88),
    ('AgentCSwin', 'tiny', 512, 20.459),  # as counted from the published code
    ('AgentCSwin', 'small', 512, 33),
    ('AgentCSwin', 'base', 768, 73),
    ('SAGAPVT', 'tiny', 512, 14.5),
    ('SAGAPVT', 'small', 512, 26.1),
    ('SAGAPVTv2', 'b0', 256, 4.2),
    ('SAGAPVTv2', 'b1', 512, 15),
    ('SAGASwin', 'tiny', 768, 32.6),
    ('SAGASwin', 'small', 768, 60),
    ('SAGASwin', 'base', 1024, 105),
    ('LinearSwin HydraAttention', 'tiny', 768, 28.3),
    ('LinearSwin EfficientAttention', 'tiny', 768, 28.3),
    ('LinearSwin LinearAngularAttention', 'tiny', 768, 28.3),
    ('LinearSwin FocusedLinearAttention', 'tiny', 768, 29),
    ('LinearSwin PolaFormerAttention', 'tiny', 768, 29),
    ('LinearSwin PolaFormerAttention', 'small', 768, 51),
    ('LinearSwin PolaFormerAttention', 'base', 1024, 89),
]


@pytest.mark.parametrize('kind, arch, channels, millions', PARAMETERS, ids=str)
def test_parameters_are_as_many_as_in_the_papers(kind: str, arch: str, channels: int, millions: float) -> None:
    """Of a classifier of 1000 classes at 224 pixels: Agent Tables 5 and 20 to 22, SAGA Tables 1 to 3."""
    kind, _, attention = kind.partition(' ')
    options: dict[str, Any] = dict(attention=dict(type=attention)) if attention else {}
    model = structure(kind, arch, out_indices=(3,), **options)
    count = sum(p.numel() for p in model.parameters() if p.requires_grad) + (channels + 1) * 1000
    assert round(count / 1e6, len(str(millions).partition('.')[2])) == millions


WRONG = [
    (dict(type='AgentPVT', arch='huge'), 'tiny, small, medium, large'),
    (dict(type='AgentPVT', agent_nums=(9, 16, 49)), 'agent_nums=.* needs one value for each of the 4 stages'),
    (dict(type='AgentPVT', agent_nums=(9, 16, 50, 49)), 'agent_num=50 must be a square number'),
    (dict(type='AgentPVT', init='authors'), "init='authors'"),
    (dict(type='AgentSwin', blocks=(2, 2, 9, 0)), 'blocks=.* do not have as many'),
    (dict(type='AgentPVT', attention=dict(type='SAGAAttention'), agent_nums=(9,) * 4), 'has no option agent_num'),
    (dict(type='AgentSwin', blocks=(2, 2)), 'blocks=.* needs one value for each of the 4 stages'),
    (dict(type='SAGAPVTv2', arch='tiny'), 'b0, b1'),
    (dict(type='SAGAPVT', agent_nums=(9, 16, 49, 49)), 'SAGAAttention has no option agent_num'),
    (dict(type='SAGAPVT', attn_drop_rate=0.1), 'attn_drop=0.1: .* no attention weights'),
    (
        dict(type='LinearPVT', attention=dict(dwc=3)),
        r'attention must be a dict\(type=..., ...\) or one for each of the 4',
    ),
    (dict(type='LinearPVT', attention=[dict(type='HydraAttention')] * 3), 'one for each of the 4 stages'),
    (dict(type='LinearPVT', attention=dict(type='HydroAttention')), r'Did you mean\n  HydraAttention'),
    (dict(type='LinearPVT', attention=dict(type='HydraAttention', power=3)), 'HydraAttention has no option power'),
    (dict(type='LinearPVT', agent_nums=(9, 16, 49, 49)), 'attention must be a dict'),
    (dict(type='AgentCSwin', depths=(1, 1)), 'depths=.* needs one value for each of the 4 stages'),
    (dict(type='AgentCSwin', pretrain_agent_nums=(9, 16)), '^pretrain_agent_nums=.* needs one value'),
    (dict(type='AgentCSwin', out_indices=(4,)), 'must lie in 0 to 3'),
    (dict(type='AgentAttention', embed_dims=8, num_heads=2, map_size=(4, 4), agents='learnt'), "agents='learnt'"),
    (dict(type='CrossWindowAttention', embed_dims=12, num_heads=3), 'num_heads=3 must be even'),
]


@pytest.mark.parametrize('config, message', WRONG, ids=lambda value: value if isinstance(value, str) else None)
def test_options_that_do_not_fit_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        MODELS.build(dict(config, type=f'mmgate.{config["type"]}'))
