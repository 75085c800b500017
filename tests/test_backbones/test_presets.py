"""Sizes by name, block for block, as the papers' tables have them, and options that do not fit."""

from __future__ import annotations

from typing import Any

import pytest
from mmengine.config import Config
from torch import nn

from mmgate.analysis.structure import build_structure
from mmgate.backbones.cswin import CrossWindowAttention
from mmgate.gates.agent import AgentGate
from mmgate.registry import MODELS

PVT_HEADS, SWIN_HEADS, CSWIN_HEADS = (1, 2, 5, 8), (3, 6, 12, 24), (2, 4, 8, 16)
# By backbone and size: the blocks of each stage, those with the attention, channels of the first stage, heads, and
# millions of parameters with a classifier of 1000 classes at the papers' rounding (Agent Tables 5 and 20 to 22, SAGA
# Tables 1 to 3). SAGA Swin-T comes to 32.6, the paper prints 32; Agent CSwin-T is counted from the published code.
SIZES: dict[tuple[str, str], tuple[tuple[int, ...], tuple[int, ...], int, tuple[int, ...], float]] = {
    ('AgentPVT', 'tiny'): ((2, 2, 2, 2), (2, 2, 2, 2), 64, PVT_HEADS, 11.6),
    ('AgentPVT', 'small'): ((3, 4, 6, 3), (3, 4, 6, 3), 64, PVT_HEADS, 20.6),
    ('AgentPVT', 'medium'): ((3, 4, 18, 3), (3, 4, 18, 3), 64, PVT_HEADS, 35.9),
    ('AgentPVT', 'large'): ((3, 8, 27, 3), (3, 8, 27, 3), 64, PVT_HEADS, 48.7),
    ('SAGAPVT', 'tiny'): ((2, 2, 2, 2), (2, 2, 2, 2), 64, PVT_HEADS, 14.5),
    ('SAGAPVT', 'small'): ((3, 4, 6, 3), (3, 4, 6, 3), 64, PVT_HEADS, 26.1),
    ('SAGAPVTv2', 'b0'): ((2, 2, 2, 2), (2, 2, 2, 2), 32, PVT_HEADS, 4.2),
    ('SAGAPVTv2', 'b1'): ((2, 2, 2, 2), (2, 2, 2, 2), 64, PVT_HEADS, 15),
    ('AgentSwin', 'tiny'): ((2, 2, 6, 2), (2, 2, 6, 0), 96, SWIN_HEADS, 29),
    ('AgentSwin', 'small'): ((2, 2, 18, 2), (2, 2, 0, 0), 96, SWIN_HEADS, 50),
    ('AgentSwin', 'base'): ((2, 2, 18, 2), (2, 2, 2, 0), 128, (4, 8, 16, 32), 88),
    ('SAGASwin', 'tiny'): ((2, 2, 6, 2), (2, 2, 6, 0), 96, SWIN_HEADS, 32.6),
    ('SAGASwin', 'small'): ((2, 2, 18, 2), (2, 2, 18, 0), 96, SWIN_HEADS, 60),
    ('SAGASwin', 'base'): ((2, 2, 18, 2), (2, 2, 18, 0), 128, (4, 8, 16, 32), 105),
    ('AgentCSwin', 'tiny'): ((2, 4, 18, 1), (2, 4, 0, 0), 64, CSWIN_HEADS, 20.459),
    ('AgentCSwin', 'small'): ((3, 6, 29, 2), (3, 6, 0, 0), 64, CSWIN_HEADS, 33),
    ('AgentCSwin', 'base'): ((3, 6, 29, 2), (3, 6, 0, 0), 96, (4, 8, 16, 32), 73),
}


def blocks_of(model: Any) -> list[list[Any]]:
    """Return the blocks of each stage."""
    if hasattr(model, 'layers'):  # PVT
        return [[block for block in blocks if hasattr(block, 'attn')] for _, blocks, _ in model.layers]
    return [list(getattr(stage, 'blocks', stage)) for stage in model.stages]


@pytest.mark.parametrize('kind, arch', SIZES)
def test_a_backbone_has_the_blocks_widths_agents_and_parameters_of_the_papers(kind: str, arch: str) -> None:
    depths, gated, width, heads, millions = SIZES[kind, arch]
    options = dict(type=f'mmgate.{kind}', arch=arch, out_indices=(3,))
    model = build_structure(Config(dict(model=options, default_scope='mmdet')))
    stages = blocks_of(model)
    assert tuple(len(blocks) for blocks in stages) == depths
    for i, blocks in enumerate(stages):
        channels = width * (1, 2, 5, 8)[i] if 'PVT' in kind else width * 2**i
        for number, block in enumerate(blocks):
            attention = getattr(block.attn, 'w_msa', block.attn)
            assert (attention.embed_dims, attention.num_heads) == (channels, heads[i])
            gate = getattr(block.attn, 'gate', None)
            assert (gate is not None) == (number < gated[i])
            if gate is not None:
                assert (gate.embed_dims, gate.num_heads) == (channels, heads[i])
                assert gate.map_size == (56 // 2**i, 56 // 2**i)
                assert isinstance(gate, AgentGate) == ('Agent' in kind)
            elif 'CSwin' in kind:
                assert type(attention) is CrossWindowAttention and attention.split == (7, None)[i - 2]
            if isinstance(gate, AgentGate):
                assert gate.grid**2 == gate.pretrain_grid**2 == (9, 16, 49, 49)[i]
            if 'PVT' in kind:
                assert block.norm1.eps == 1e-6 and block.ffn.layers[0].out_channels == (8, 8, 4, 4)[i] * channels
        if 'PVT' in kind:
            embed = model.layers[i][0]
            assert embed.projection.stride == ((4, 4), (2, 2), (2, 2), (2, 2))[i]
            assert embed.norm.eps == 1e-5  # the authors', where mmdet has the blocks'
    count = sum(p.numel() for p in model.parameters() if p.requires_grad) + (channels + 1) * 1000
    assert round(count / 1e6, len(str(millions).partition('.')[2])) == millions


THREE: dict[str, Any] = dict(num_heads=(1, 2, 5), out_indices=(0, 1, 2))
THREE_PVT = dict(THREE, num_layers=(1, 1, 1), patch_sizes=(4, 2, 2), strides=(4, 2, 2), paddings=(0, 0, 0))
OTHERS: list[tuple[dict[str, Any], list[int | None]]] = [  # agents of every block; None for another attention
    (dict(type='AgentPVT', attention=[{}, {}, {}, dict(type='SoftmaxAttention')]), [9, 9, 16, 16, 49, 49, None, None]),
    (dict(type='AgentPVT', attention=dict(type='AgentAttention', agent_num=4), num_layers=(1, 1, 1, 1)), [4] * 4),
    (dict(type='AgentPVT', attention=dict(type='SAGAAttention')), [None] * 8),
    (dict(type='AgentPVT', mlp_ratios=(8, 8, 4), **THREE_PVT), [9, 16, 49]),
    (dict(type='AgentSwin', depths=(1, 1, 1), embed_dims=20, **THREE), [9, 16, 49]),
    (dict(type='AgentSwin', depths=(1, 1, 3, 1)), [9, 16, 49, 49, 49, None]),
    (dict(type='Swin', depths=(1, 1, 1, 1), attention=dict(type='AgentAttention', agent_num=4)), [4] * 4),
]


@pytest.mark.parametrize('config, agents', OTHERS, ids=lambda value: value.get('type') if 'type' in value else None)
def test_defaults_give_way_to_options(config: dict[str, Any], agents: list[int | None]) -> None:
    """To a stage's own type and to other numbers of stages and of blocks."""
    model = MODELS.build(dict(config, type=f'mmgate.{config["type"]}'))
    attentions = [module.attn for module in model.modules() if hasattr(module, 'attn')]
    found = [getattr(attn, 'gate', None) for attn in attentions if type(attn) is not nn.MultiheadAttention]
    assert [gate.grid**2 if isinstance(gate, AgentGate) else None for gate in found] == agents


def test_strides_make_the_maps() -> None:
    model = MODELS.build(dict(type='mmgate.SAGASwin', depths=(1, 1, 1, 1), strides=(4, 2, 1, 2)))
    assert [stage.blocks[0].attn.gate.map_size[0] for stage in model.stages[:3]] == [56, 28, 28]


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
    (dict(type='PVT', attention=dict(dwc=3)), r'attention must be a dict\(type=..., ...\) or one for each of the 4'),
    (dict(type='PVT', attention=[dict(type='SAGAAttention')] * 3), 'one for each of the 4 stages'),
    (dict(type='PVT', attention=dict(type='SAGOAttention')), r'Did you mean\n  SAGAAttention'),
    (dict(type='PVT', attention=dict(type='SAGAAttention', power=3)), 'SAGAAttention has no option power'),
    (dict(type='PVT', agent_nums=(9, 16, 49, 49)), 'attention must be a dict'),
    (dict(type='AgentCSwin', depths=(1, 1)), 'depths=.* needs one value for each of the 4 stages'),
    (dict(type='AgentCSwin', pretrain_agent_nums=(9, 16)), '^pretrain_agent_nums=.* needs one value'),
    (dict(type='AgentCSwin', out_indices=(4,)), 'must lie in 0 to 3'),
    (dict(type='AgentCSwin', embed_dims=48, num_heads=(3,) * 4, agent_nums=(None,) * 4), 'num_heads=3 must be even'),
    (dict(type='AgentCSwin', splits=(0, 2, 7, None)), 'split=0 must be an integer'),
    (dict(type='AgentAttention', embed_dims=8, num_heads=2, map_size=(4, 4), agents='learnt'), "agents='learnt'"),
]


@pytest.mark.parametrize('config, message', WRONG, ids=lambda value: value if isinstance(value, str) else None)
def test_options_that_do_not_fit_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        MODELS.build(dict(config, type=f'mmgate.{config["type"]}'))
