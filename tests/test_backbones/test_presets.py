"""Sizes by name, block for block, as the papers' tables have them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mmengine.config import Config
from mmengine.registry import MODELS
from torch import nn

from mmgate.analysis.report.structure import build_structure
from mmgate.layers import AgentAttention, CrossWindowAttention
from mmgate.layers.base.map import MapAttention


def structure(kind: str, arch: str, **options: Any) -> Any:
    return build_structure(Config(dict(model=dict(type=f'mmgate.{kind}', arch=arch, **options), default_scope='mmdet')))


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
def test_swin(kind: str, arch: str) -> None:
    options = dict(attention=dict(type='FocusedLinearAttention')) if kind == 'LinearSwin' else {}
    stages = structure(kind, arch, **options).stages
    assert tuple(''.join('wA'[isinstance(b.attn, MapAttention)] for b in s.blocks) for s in stages) == SWIN[kind, arch]
    width, heads = (128, 4) if arch == 'base' else (96, 3)
    for i, stage in enumerate(stages):
        for attention in (getattr(block.attn, 'w_msa', block.attn) for block in stage.blocks):
            assert (attention.embed_dims, attention.num_heads) == (width * 2**i, heads * 2**i)
            if isinstance(attention, MapAttention):
                assert attention.map_size == (56 // 2**i, 56 // 2**i)
                if isinstance(attention, AgentAttention):
                    assert attention.grid**2 == attention.pretrain_grid**2 == (9, 16, 49, 49)[i]
            else:
                assert attention.window_size == (7, 7)


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
def test_pvt(kind: str, arch: str) -> None:
    stages = structure(kind, arch).layers
    assert tuple(sum(hasattr(block, 'attn') for block in blocks) for _, blocks, _ in stages) == PVT[kind, arch]
    for i, (embed, blocks, _) in enumerate(stages):
        assert embed.projection.stride == ((4, 4), (2, 2), (2, 2), (2, 2))[i]
        for block in (block for block in blocks if hasattr(block, 'attn')):
            attention = block.attn
            assert attention.embed_dims == (64, 128, 320, 512)[i] // (2 if arch == 'b0' else 1)
            assert attention.num_heads == (1, 2, 5, 8)[i] and attention.map_size == (56 // 2**i, 56 // 2**i)
            assert block.ffn.layers[0].out_channels == (8, 8, 4, 4)[i] * attention.embed_dims
            if kind == 'AgentPVT':
                assert attention.grid**2 == attention.pretrain_grid**2 == (9, 16, 49, 49)[i]


CSWIN = {
    'tiny': ((2, 4, 18, 1), 64, (2, 4, 8, 16)),
    'small': ((3, 6, 29, 2), 64, (2, 4, 8, 16)),
    'base': ((3, 6, 29, 2), 96, (4, 8, 16, 32)),
}


@pytest.mark.parametrize('arch', CSWIN)
def test_cswin(arch: str) -> None:
    depths, width, heads = CSWIN[arch]
    stages = structure('AgentCSwin', arch).stages
    assert tuple(len(stage) for stage in stages) == depths
    for i, stage in enumerate(stages):
        for attention in (block.attn for block in stage):
            assert (attention.embed_dims, attention.num_heads) == (width * 2**i, heads[i])
            if i < 2:
                assert isinstance(attention, AgentAttention) and attention.grid**2 == (9, 16)[i]
                assert attention.map_size == (56 // 2**i, 56 // 2**i)
            else:
                assert isinstance(attention, CrossWindowAttention) and attention.split == (7, None)[i - 2]


@torch.no_grad()
@pytest.mark.parametrize('kind', ['AgentPVT', 'SAGAPVT', 'SAGAPVTv2'])
def test_patch_norms_of_pvt_have_an_epsilon_of_their_own(kind: str) -> None:
    """1e-5, where mmdet gives them the blocks' 1e-6: another image where patches differ by little."""
    model = MODELS.build(dict(type=f'mmgate.{kind}', num_layers=(1, 1, 1, 1)))
    for embed, blocks, _ in model.layers:
        conv, norm = embed.projection, embed.norm
        nn.init.normal_(conv.weight, std=3e-3 / conv.weight[0].numel() ** 0.5)
        nn.init.normal_(conv.bias, std=1e-3)
        image = torch.randn(1, conv.in_channels, 16, 16)
        tokens = conv(image).flatten(2).transpose(1, 2)
        expected = F.layer_norm(tokens, tokens.shape[-1:], norm.weight, norm.bias, 1e-5)
        other = F.layer_norm(tokens, tokens.shape[-1:], norm.weight, norm.bias, 1e-6)
        torch.testing.assert_close(embed(image)[0], expected)
        assert not torch.allclose(expected, other, rtol=1e-2)
        assert all(block.norm1.eps == 1e-6 for block in blocks if hasattr(block, 'attn'))
