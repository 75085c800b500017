"""Measures of attention maps, on cases that are known by hand."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mmgate.analysis.probes.cka import alignment, dependence_of, dependences, products
from mmgate.analysis.probes.layers import effective_rank, matrix_rank
from mmgate.analysis.probes.measures import roll_back


def attention(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).softmax(-1)


def test_rows_of_the_rollout_are_those_of_its_matrices() -> None:
    """The product from the last layer to the first, each with a half of the identity; any number of rows."""
    maps, relevance = [attention(6, 6) for _ in range(3)], torch.rand(2, 6, dtype=torch.float64)
    first, middle, last = (0.5 * (weights + torch.eye(6, dtype=torch.float64)) for weights in maps)
    expected = relevance @ last @ middle @ first
    for weights in reversed(maps):
        relevance = roll_back(relevance, weights)
    torch.testing.assert_close(relevance, expected)


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
    found = roll_back(relevance.flatten(), attention(35, 6), (5, 7, 2)).view(5, 7)
    torch.testing.assert_close(found.sum(), relevance.sum())
    torch.testing.assert_close(found[:, -1], relevance[:, -1] / 2)  # 2 x 3 keys; the last row and column have none


def cka(x: Tensor, y: Tensor) -> float:
    return float(alignment(dependences([x, y]))[0, 1])


def test_cka_of_itself_is_one_whatever_the_rotation_and_scale() -> None:
    x, (rotation, _) = torch.randn(40, 6), torch.linalg.qr(torch.randn(6, 6))
    assert cka(x, x) == pytest.approx(1)
    assert cka(x, 3 * x @ rotation + 1) == pytest.approx(1, abs=1e-5)
    assert np.isnan(cka(x, torch.ones(40, 6))) and np.isnan(cka(x[:3], x[:3]))


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
    assert dependence_of(products(x), products(y)) == pytest.approx(expected)


@pytest.mark.parametrize('rank', [1, 3, 8])
def test_rank_of_a_known_kv(rank: int) -> None:
    """Orthogonal keys and values of equal size: the map's singular values are 1, as many as the rank."""
    key, value = (torch.linalg.qr(torch.randn(20, 8, dtype=torch.float64))[0] for _ in range(2))
    kv = key[:, :rank] @ value[:, :rank].T
    assert int(matrix_rank(kv)) == rank and float(effective_rank(kv)) == pytest.approx(rank)
    assert int(matrix_rank(0 * kv)) == float(effective_rank(0 * kv)) == 0


@pytest.mark.parametrize('dtype', [torch.float32, torch.float64, torch.float16], ids=str)
def test_matrix_rank_counts_small_singular_values(dtype: torch.dtype) -> None:
    """Half a percent of the largest is rank, unless it may be rounding (float16); entropy has it little above 2."""
    values = torch.tensor([1.0, 1.0, 0.005, 0.005, 0, 0, 0, 0], dtype=torch.float64)
    left, right = (torch.linalg.qr(torch.randn(8, 8, dtype=torch.float64))[0] for _ in range(2))
    kv = (left * values @ right).to(dtype)
    assert int(matrix_rank(kv)) == (4 if dtype is not torch.float16 else 2)
    assert 2 < float(effective_rank(kv)) < 2.2
