"""The starts of the gating modulation."""

from __future__ import annotations

import pytest
import torch
from helpers.starts import C, H, assert_uniform, deformable, dense, initialised

from mmgate.gates import PLuGMultiheadAttention
from mmgate.gates.gml import VARIANTS, GatingModulation


@pytest.mark.parametrize(
    'variant, bounds',
    {
        'product': {'weight': 2**0.5, 'bias': 1},
        'sum': {'weight': 2**0.5, 'bias': 1},
        'single': {'weight': 3**0.5, 'bias': 1},
        'mlp': {'hidden_weight': 1.2**0.5, 'hidden_bias': 1, 'weight': 1, 'bias': 0.5},
        'none': {},
    }.items(),
    ids=VARIANTS[:2] + ('single', 'mlp', 'none'),
)
def test_paper_start_of_the_gml(variant: str, bounds: dict[str, float]) -> None:
    starts = [GatingModulation(variant, init='paper').state_dict() for _ in range(200)]
    assert all(set(start) == set(bounds) for start in starts)
    for name, bound in bounds.items():
        assert_uniform(torch.stack([start[name] for start in starts]), bound)


@pytest.mark.parametrize('variant', VARIANTS)
def test_start_of_vision_transformers(variant: str) -> None:
    """Every weight normal of deviation 0.02, every bias 0; whatever the host draws afterwards, and without a swap."""
    rules = [
        dict(type='PLuGMultiheadAttention', gml=variant, init='vit'),
        dict(type='PLuGMultiScaleDeformableAttention', gml=variant, init='vit', granularity='head_level_point'),
    ]
    layers = initialised('mask2former', (dense, rules[0]), (deformable, rules[1])).layers
    for layer in (*layers, PLuGMultiheadAttention(C, H, gml=variant, init='vit').attn):
        for name, parameter in layer.named_parameters():
            if name.startswith('g') and name.endswith('bias'):
                assert not parameter.any(), name
            elif name.startswith('g'):
                assert 0 < parameter.abs().max() < 0.1, name
                assert parameter.numel() < 200 or 0.018 < parameter.std() < 0.022, name


@pytest.mark.parametrize('init, narrow', [(b'vit', True), (b'paper', False)])
def test_a_start_is_known_by_its_letters(init: bytes, narrow: bool) -> None:
    """A name that was read from a file is another object than the one in the code."""
    gml = GatingModulation(init=str(init, 'ascii'))
    gml.reset_parameters()
    assert gml.bias.eq(0).all() == narrow
