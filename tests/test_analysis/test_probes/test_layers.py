"""Ranks of maps and shares of first tokens, on cases that are known by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.given_attention import TOKENS, GivenAttention, Layer, Model, batches

from mmgate.analysis.probes.layers import effective_rank, matrix_rank, sinks


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
    """Four windows, each with all attention of a head on another key; what has become infinite is not nothing."""
    weights = torch.full((1, 4, 2, TOKENS, TOKENS), 1 / TOKENS)
    weights[0, :, 0] = torch.eye(TOKENS)[:4, None]
    (found,) = sinks(
        Model(Layer(GivenAttention(weights), torch.full((1, TOKENS, 4), torch.inf)), class_token=False), batches(1)
    )
    assert found['largest_head_share'] == 1 and found['sink_share'] == pytest.approx(0.5 + 0.5 / TOKENS)
    assert found['maximum_activation'] == torch.inf
