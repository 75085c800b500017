"""Centred kernel alignment of layers, on cases that are known by hand."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from helpers.given_attention import SIDE, TOKENS, GivenAttention, Model, attention, batches
from torch import Tensor

from mmgate.analysis.probes.cka import alignment, attention_cka, dependences
from mmgate.errors import ConfigError


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
    assert dependences([x, y])[0, 1] == pytest.approx(expected)


@pytest.mark.parametrize('images', [8, 1032], ids=['one block', 'two blocks'])
def test_layers_of_one_class_token_row_have_a_cka_of_one(images: int) -> None:
    """Whatever their other rows are."""
    one, other, unrelated = (attention(images, 1, 2, TOKENS, TOKENS) for _ in range(3))
    other[..., 0, :] = one[..., 0, :]
    model = Model(GivenAttention(one), GivenAttention(other), GivenAttention(unrelated))
    paths, found = attention_cka(model, batches(images))
    assert paths == ['layers.0', 'layers.1', 'layers.2']
    assert found[0, 1] == pytest.approx(1) and np.diag(found) == pytest.approx(1)
    assert abs(found[0, 2]) < (0.9 if images == 8 else 0.1)


def test_cka_without_a_class_token_is_of_the_mean_query() -> None:
    one, other = (attention(8, 1, 2, SIDE**2, SIDE**2) for _ in range(2))
    other += (one - other).mean(-2, keepdim=True)
    found = attention_cka(Model(GivenAttention(one), GivenAttention(other), class_token=False), batches(8))[1]
    assert found[0, 1] == pytest.approx(1)


def test_cka_refuses_what_has_no_samples() -> None:
    with pytest.raises(ConfigError, match='needs 4 images or more, got 3'):
        attention_cka(Model(GivenAttention(attention(3, 1, 2, TOKENS, TOKENS))), batches(3))
