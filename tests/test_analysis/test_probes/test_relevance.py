"""Rollout, maps of heads and agents, similarity of layers, sinks and ranks, on cases that are known by hand."""

from __future__ import annotations

from functools import partial
from itertools import permutations
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import filled, needs_mmpretrain
from torch import Tensor, nn

import mmgate
from mmgate import note
from mmgate.analysis.probes.cka import alignment, attention_cka, dependences
from mmgate.analysis.probes.layers import effective_rank, matrix_rank, sinks
from mmgate.analysis.probes.relevance import (
    agent_maps,
    head_maps,
    head_mean,
    record_maps,
    relevance_map,
    roll_back,
)
from mmgate.errors import ConfigError

SIDE = 3
TOKENS = 1 + SIDE**2


class GivenAttention(nn.Module):
    """A stranger's attention, whose weights ``(images, B, H, N, M)`` are given, and where its windows lie."""

    def __init__(self, weights: Tensor, geometry: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.weights, self.geometry = weights, geometry

    def forward(self, image: int) -> None:
        note(self, 'attention', lambda: self.weights[image])
        if self.geometry:
            note(self, 'geometry', torch.tensor(self.geometry))


class Layer(nn.Module):
    """An attention; the hidden states after it are ``states``."""

    def __init__(self, attn: nn.Module, states: Tensor) -> None:
        super().__init__()
        self.attn, self.states = attn, states

    def forward(self, image: int) -> Tensor:
        self.attn(image)
        return self.states


class Model(nn.Module):
    """Layers of given attention, with a class token or without."""

    def __init__(self, *layers: nn.Module, class_token: bool = True) -> None:
        super().__init__()
        self.layers, self.cls_token = nn.ModuleList(layers), nn.Parameter(torch.zeros(1)) if class_token else None

    def test_step(self, batch: dict[str, int]) -> list[Any]:
        for layer in self.layers:
            layer(batch['image'])
        return [SimpleNamespace(get=dict(img_shape=(9, 9)).get, img_shape=(9, 9))]


def batches(count: int) -> list[dict[str, int]]:
    return [dict(image=image) for image in range(count)]


def attention(*shape: int) -> Tensor:
    return torch.randn(*shape).softmax(-1)


@pytest.mark.parametrize('shift', [0, 1], ids=['plain', 'shifted'])
@pytest.mark.parametrize('size', [(4, 6), (3, 5)], ids=['whole windows', 'padded'])
def test_roll_back_through_identical_windows(size: tuple[int, int], shift: int) -> None:
    """Windows that attend to themselves change nothing; what they attend to each other stays in them."""
    relevance = torch.rand(size).flatten()
    own = torch.eye(4).expand(6, 4, 4)
    torch.testing.assert_close(roll_back(relevance, own, (*size, 2, shift)), relevance)
    torch.testing.assert_close(roll_back(relevance, own, (*size, 2, 2, shift)), relevance)
    one = torch.zeros(4, 6)
    one[1, 1] = 1  # the first window holds it, or with the shift the one from (1, 1) to (2, 2)
    found = roll_back(one.flatten(), torch.full((6, 4, 4), 0.25), (4, 6, 2, shift))
    expected = torch.zeros(4, 6)
    expected[shift : shift + 2, shift : shift + 2] = 0.125
    expected[1, 1] += 0.5
    torch.testing.assert_close(found, expected.flatten())


def test_roll_back_goes_from_queries_to_keys() -> None:
    """In windows as without: all attend to the first token of their window."""
    weights = torch.zeros(2, 2, 2)
    weights[..., 0] = 1
    found = roll_back(torch.tensor([0.1, 0.2, 0.3, 0.4]), weights, (1, 4, 1, 2, 0), residual=0.0)
    torch.testing.assert_close(found, torch.tensor([0.3, 0.0, 0.7, 0.0]))


def test_roll_back_through_reduced_keys_keeps_the_sum() -> None:
    relevance = torch.rand(5, 7, dtype=torch.float64)
    found = roll_back(relevance.flatten(), attention(35, 6).double(), (5, 7, 2)).view(5, 7)
    torch.testing.assert_close(found.sum(), relevance.sum())
    torch.testing.assert_close(found[:, -1], relevance[:, -1] / 2)  # 2 x 3 keys; the last row and column have none


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


def test_maps_of_agents_are_means_over_heads() -> None:
    class Agents(nn.Module):
        def forward(self, image: int) -> None:
            note(self, 'agents', maps)

    maps = torch.rand(1, 2, 4, SIDE, SIDE)  # (B, H, n, h, w)
    path, found, _ = agent_maps(Model(Agents()), dict(image=0))
    assert path == 'layers.0'
    np.testing.assert_allclose(found, maps[0].mean(0))


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

    sizes: Any = dict(window_size=(4, 4, 2, 2), embed_dim=8, depths=(2, 2, 1, 1), num_heads=(1, 2, 2, 2))
    return GlobalContextVit(img_size=64, **sizes)


@needs_mmpretrain
@pytest.mark.parametrize(('make', 'side'), [(tiny_vit, 8), (gc_vit, 16)], ids=['TinyViT', 'GC ViT'])
def test_rollout_through_the_windows_of_classifiers(make: Any, side: int) -> None:
    """Every window is found, gated or not; a start that is the vanilla one has the vanilla map."""
    torch.manual_seed(0)
    model, image = filled(make(), 0.3), torch.randn(1, 3, 64, 64)
    maps = []
    for gated in (False, True):
        if gated:
            mmgate.swap_attention(model, dict(path='**', type='PLuGMultiheadAttention'))
        model.eval()  # which returns None of some models
        with record_maps(model) as recording, torch.no_grad():
            model(image)
        for weights in (x for of in recording.values() if 'attention' in of for x in of['attention'].tensors):
            torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))
        maps.append(relevance_map(model, recording, (64, 64)))
    assert maps[0].shape == (side, side) and maps[0].std() > 0 and maps[0].min() >= 0
    assert float(maps[0].sum()) == pytest.approx(1, abs=1e-4)
    torch.testing.assert_close(maps[1], maps[0], rtol=1e-3, atol=1e-6)


def test_cka_is_one_whatever_the_rotation_and_scale_and_unknown_of_what_is_constant() -> None:
    x, (rotation, _) = torch.randn(40, 6), torch.linalg.qr(torch.randn(6, 6))
    found = alignment(dependences([x, 3 * x @ rotation + 1, torch.ones(40, 6)]))
    assert found[0, :2] == pytest.approx(1, abs=1e-5) and np.isnan(found[2]).all()
    assert np.isnan(dependences([x[:3]])).all()


def test_cka_is_computed_by_pairs_of_rows() -> None:
    """Against the definition of the unbiased dependence: the mean over all quadruples of different rows."""
    x, y = torch.randn(6, 2, dtype=torch.float64), torch.randn(6, 3, dtype=torch.float64)
    one, other = (z @ z.T for z in (x, y))

    def mean(value: Any, rows: int) -> float:
        return float(np.mean([value(*chosen) for chosen in permutations(range(6), rows)]))

    expected = (
        mean(lambda i, j: one[i, j] * other[i, j], 2)
        + mean(lambda i, j, k, m: one[i, j] * other[k, m], 4)
        - 2 * mean(lambda i, j, k: one[i, j] * other[i, k], 3)
    )
    assert dependences([x, y])[0, 1] == pytest.approx(expected)


def test_cka_is_that_of_the_class_tokens_rows_in_blocks_of_images() -> None:
    """Whatever the other rows are; dependences of blocks of 1024 images and of the rest are summed up."""
    images = 1032
    one, other, unrelated = (attention(images, 1, 2, TOKENS, TOKENS) for _ in range(3))
    other[..., 0, :] = one[..., 0, :]
    model = Model(GivenAttention(one), GivenAttention(other), GivenAttention(unrelated))
    paths, found = attention_cka(model, batches(images))
    assert paths == ['layers.0', 'layers.1', 'layers.2']
    assert found[0, 1] == pytest.approx(1) and np.diag(found) == pytest.approx(1)
    rows = [weights[:, 0, :, 0, 1:].flatten(1) for weights in (one, other, unrelated)]
    first, rest = (dependences([layer[part] for layer in rows]) for part in (slice(1024), slice(1024, None)))
    np.testing.assert_allclose(found, alignment(1024 * first + 8 * rest))


def test_cka_without_a_class_token_is_of_the_mean_query_and_of_four_images_or_more() -> None:
    one, other = (attention(8, 1, 2, SIDE**2, SIDE**2) for _ in range(2))
    other += (one - other).mean(-2, keepdim=True)
    found = attention_cka(Model(GivenAttention(one), GivenAttention(other), class_token=False), batches(8))[1]
    assert found[0, 1] == pytest.approx(1)
    with pytest.raises(ConfigError, match='needs 4 images or more, got 3'):
        attention_cka(Model(GivenAttention(attention(3, 1, 2, TOKENS, TOKENS))), batches(3))


SMALL = [1, 1, 0.005, 0.005]  # half a percent of the largest is rank, unless it may be rounding


@pytest.mark.parametrize(
    ('values', 'dtype', 'rank', 'effective'),
    [
        *(([1] * rank, torch.float64, rank, rank) for rank in (0, 1, 3, 8)),
        (SMALL, torch.float64, 4, 2.064),
        (SMALL, torch.float32, 4, 2.064),
        (SMALL, torch.float16, 2, 2.064),
    ],
)
def test_ranks_are_those_of_the_singular_values(values: Any, dtype: torch.dtype, rank: int, effective: float) -> None:
    """The effective rank is the exponential of their entropy."""
    left, right = (torch.linalg.qr(torch.randn(8, 8, dtype=torch.float64))[0] for _ in range(2))
    kv = (left[:, : len(values)] * torch.tensor(values, dtype=torch.float64) @ right[: len(values)]).to(dtype)
    assert int(matrix_rank(kv)) == rank and float(effective_rank(kv)) == pytest.approx(effective, rel=1e-3)


@pytest.mark.parametrize(('first', 'sink'), [(0, 0), (0.2, 4)], ids=['the first', 'another'])
def test_first_token_score_beside_the_most_attended(first: float, sink: int) -> None:
    """Known shares: 0.6 on the sink, and what is said on the first token; 7 is the first token's activation."""
    weights = torch.full((1, 1, 2, TOKENS, TOKENS), 0.0)
    weights[..., 0] = first
    weights[..., sink] = 0.6
    weights[..., 7] += 0.4 - first
    states = torch.ones(1, TOKENS, 4)
    states[0, 0, 1], states[0, 3, 2] = -7, 50
    (found,) = sinks(Model(Layer(GivenAttention(weights), states)), batches(1))
    assert found['sink_share'] == pytest.approx(0.6)
    assert found['first_token_share'] == pytest.approx(0.6 if sink == 0 else 0.2)
    assert (found['maximum_activation'], found['first_token_activation']) == (50, 7)
    (without,) = sinks(Model(Layer(GivenAttention(weights), states), class_token=False), batches(1))
    assert np.isnan([without['first_token_share'], without['first_token_activation']]).all()
    assert without['sink_share'] == found['sink_share'] and without['uniform'] == pytest.approx(1 / TOKENS)


def test_each_window_has_its_own_sink() -> None:
    """Three of four windows have all attention of a head on another key; what has become infinite is not nothing."""
    weights = torch.full((1, 4, 2, TOKENS, TOKENS), 1 / TOKENS)
    weights[0, :3, 0] = torch.eye(TOKENS)[:3, None]
    layer = Layer(GivenAttention(weights), torch.full((1, TOKENS, 4), torch.inf))
    (found,) = sinks(Model(layer, class_token=False), batches(1))
    assert found['largest_head_share'] == pytest.approx((3 + 1 / TOKENS) / 4)
    assert found['sink_share'] == pytest.approx((3 * (1 + 1 / TOKENS) / 2 + 1 / TOKENS) / 4)
    assert found['maximum_activation'] == torch.inf
