"""Rollout and maps of heads, and of whole models, on cases that are known by hand."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from conftest import needs_mmpretrain
from helpers.given_attention import SIDE, TOKENS, GivenAttention, Model, attention
from torch import nn

import mmgate
from mmgate.analysis.probes.relevance import head_maps, head_mean, record_maps, relevance_map
from mmgate.errors import ConfigError


def test_heads_that_disagree_cancel_out_but_by_their_sizes() -> None:
    """Signed, their mean is 0 throughout; by its size each has a share."""
    signed = torch.tensor([[0.75, -0.25], [-0.75, 0.25]])[None, :, None].expand(1, 2, 2, 2)
    assert head_mean(signed, absolute=True).unique().tolist() == [0.25, 0.75]
    assert head_mean(signed).unique().tolist() == [0]


def test_rollout_of_signed_maps_is_signed() -> None:
    """The class token's row, two layers deep, with the sizes of each head's rows summing to 1."""
    weights = [attention(1, 1, 2, TOKENS, TOKENS) - attention(1, 1, 2, TOKENS, TOKENS) for _ in range(2)]
    model = Model(*(GivenAttention(x) for x in weights))
    with record_maps(model) as recording:
        model.test_step(dict(image=0))
    found = relevance_map(model, recording, (9, 9))
    shares = [(x[0, 0] / x[0, 0].abs().sum(-1, keepdim=True)).mean(0) for x in weights]
    first, last = (0.5 * (x + torch.eye(TOKENS)) for x in shares)
    expected = (last @ first)[0, 1:]
    torch.testing.assert_close(found.flatten(), expected / expected.abs().sum())
    assert found.min() < 0 < found.max()
    with record_maps(model, partial(head_mean, absolute=True)) as recording:
        model.test_step(dict(image=0))
    assert relevance_map(model, recording, (9, 9)).min() >= 0


def test_maps_of_heads_keep_their_signs() -> None:
    """The class token's row of each head, inhibition below 0."""
    weights = attention(1, 1, 2, TOKENS, TOKENS)
    weights[:, :, 1] *= -1
    path, maps, _ = head_maps(Model(GivenAttention(weights), GivenAttention(-weights)), dict(image=0), layer=0)
    assert path == 'layers.0' and maps.shape == (2, SIDE, SIDE)
    np.testing.assert_array_equal(maps, weights[0, 0, :, 0, 1:].view(2, SIDE, SIDE))
    assert maps[0].min() > 0 > maps[1].max()
    with pytest.raises(ConfigError, match='--layer 2: Model has 2 attentions over an image'):
        head_maps(Model(GivenAttention(weights), GivenAttention(-weights)), dict(image=0), layer=2)


def test_maps_of_heads_in_windows_lie_where_they_are() -> None:
    """Four windows of 2 x 2; each attends to its own first token, which the second head inhibits."""
    weights = torch.zeros(1, 4, 2, 4, 4)
    weights[:, :, 0, :, 0], weights[:, :, 1, :, 0] = 1, -1
    _, maps, _ = head_maps(Model(GivenAttention(weights, (4, 4, 2, 0)), class_token=False), dict(image=0))
    expected = np.zeros((4, 4))
    expected[::2, ::2] = 1
    np.testing.assert_array_equal(maps, [expected, -expected])


def tiny_vit() -> nn.Module:
    from mmpretrain.models import TinyViT

    arch = dict(channels=[8, 16, 16, 16], num_heads=[1, 2, 2, 2], depths=[1, 1, 2, 1])
    return TinyViT(arch, img_size=(64, 64), window_size=[4, 3, 4, 2], out_indices=(3,), drop_path_rate=0.0)


def gc_vit() -> nn.Module:
    from timm.models.gcvit import GlobalContextVit

    return GlobalContextVit(
        img_size=64, window_size=(4, 4, 2, 2), embed_dim=8, depths=(2, 2, 1, 1), num_heads=(1, 2, 2, 2)
    )


def swin() -> nn.Module:
    from mmpretrain.models import SwinTransformer

    arch = dict(embed_dims=8, depths=[2, 2], num_heads=[1, 2])
    return SwinTransformer(arch, img_size=64, window_size=4, out_indices=(1,))


@needs_mmpretrain
@pytest.mark.parametrize('gate', ['PLuGMultiheadAttention', 'SDPAGatedMultiheadAttention'])
@pytest.mark.parametrize('make', [tiny_vit, gc_vit, swin], ids=lambda make: make.__name__)
def test_rollout_through_the_windows_of_classifiers(make: Any, gate: str) -> None:
    """Every window is found, gated or not; a start that is the vanilla one has the vanilla map."""
    maps = []
    for gated in (False, True):
        torch.manual_seed(0)
        model = make()
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.3)
        if gated:
            mmgate.swap_attention(model, dict(path='**', type=gate))
        model.eval()
        torch.manual_seed(1)
        with record_maps(model) as recording, torch.no_grad():
            model(torch.randn(1, 3, 64, 64))
        weights = [x for of in recording.values() if 'attention' in of for x in of['attention'].tensors]
        for x in weights:
            torch.testing.assert_close(x.sum(-1), torch.ones(x.shape[:-1]))
        maps.append(relevance_map(model, recording, (64, 64)))
        assert float(maps[-1].sum()) == pytest.approx(1, abs=1e-4) and maps[-1].min() >= 0
    assert maps[0].shape == {'tiny_vit': (8, 8)}.get(make.__name__, (16, 16)) and maps[0].std() > 0
    if gate == 'PLuGMultiheadAttention':
        torch.testing.assert_close(maps[1], maps[0], rtol=1e-3, atol=1e-6)
