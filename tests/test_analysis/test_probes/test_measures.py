"""Rollout through windows, reduced keys and many layers, on cases that are known by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

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
