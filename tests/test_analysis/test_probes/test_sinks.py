"""Kinds of sinks, on made-up attention whose kind is known."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.given_attention import TOKENS, Given, Layer, Model, Valued, batches
from torch import Tensor

from mmgate.analysis.probes.sinks import describe_sinks, kind_of_sink, measure_heads, sink_heads, stable_rank

WIDTH = 8
SHARE = 0.7
SINKS = 2, 5, 7


def attention(sink: int | None, share: float = SHARE) -> Tensor:
    """Return weights ``(N, N)``, of which every query gives ``share`` to the sink and the rest to itself."""
    if sink is None:
        return torch.eye(TOKENS)
    weights = (1 - share) * torch.eye(TOKENS)
    weights[:, sink] += share
    return weights


def values(sink: int | None, size: float) -> Tensor:
    """Return values ``(M, d)`` of norm 1 in all directions, that of the sink ``size`` times as large."""
    found = torch.zeros(TOKENS, WIDTH)
    found[range(TOKENS), [key % WIDTH for key in range(TOKENS)]] = 1
    if sink is not None:
        found[sink] *= size
    return found


def heads(model: Model, images: int = 1) -> list[dict[str, object]]:
    return sink_heads(model, batches(images))


def layer(weights: list[Tensor], of_values: list[Tensor]) -> Layer:
    stacked = torch.stack(weights), torch.stack(of_values)
    return Layer(Valued(*(x[None, None] for x in stacked)), torch.zeros(1, TOKENS, 4))


def test_each_kind_of_sink_is_known_as_what_it_is() -> None:
    """A sink without a value does nothing; one with a large value hands it to all; without a sink there is none."""
    weights = [attention(2), attention(5), attention(7, 0.35), attention(None)]
    model = Model(layer(weights, [values(2, 0.05), values(5, 3.0), values(7, 0.6), values(None, 1.0)]))
    rows = heads(model)
    assert [row['kind'] for row in rows] == ['no-op', 'broadcast', 'unclear', 'no sink'] and [
        row['head'] for row in rows
    ] == [0, 1, 2, 3]
    assert {row['layer'] for row in rows} == {'layers.0.attn'} and {row['largest_rank'] for row in rows} == {WIDTH}
    assert [row['value_norm'] for row in rows[:3]] == pytest.approx([0.05, 3.0, 0.6])
    assert {row['uniform'] for row in rows} == {1 / TOKENS}
    shares = [share + (1 - share) / TOKENS for share in (SHARE, SHARE, 0.35, 0)]
    assert [row['sink_share'] for row in rows] == pytest.approx(shares)
    ranks = [row['output_rank'] for row in rows]
    assert ranks[1] < 1.1 and min(ranks[0], *ranks[2:]) > 3


def test_ranks_of_outputs_by_hand() -> None:
    """All queries receive one value, or each its own of ten, two of them twice among eight directions."""
    one = torch.zeros(TOKENS, TOKENS)
    one[:, 4] = 1
    share, _, rank = measure_heads(one[None, None], values(None, 1)[None, None])[:, 0].tolist()
    assert (share, rank) == pytest.approx((1, 1))
    *_, rank = measure_heads(torch.eye(TOKENS)[None, None], values(None, 1)[None, None])[:, 0].tolist()
    assert rank == pytest.approx(TOKENS / 2)


def test_a_stable_rank_by_hand() -> None:
    left, right = (torch.linalg.qr(torch.randn(9, 4, dtype=torch.float64))[0] for _ in range(2))
    assert float(stable_rank(left * torch.tensor([2.0, 1.0, 1.0, 0.0]) @ right.T)) == pytest.approx(1.5)
    assert float(stable_rank(left * torch.tensor([1.0, 0.01, 0.01, 0.01]) @ right.T)) == pytest.approx(1, abs=1e-3)
    assert float(stable_rank(torch.zeros(3, 4))) == 0


def test_signed_weights_count_by_their_size() -> None:
    """Half of a head inhibits; the share is of absolute values, the output of signed ones."""
    weights = torch.zeros(1, 1, TOKENS, TOKENS)
    weights[..., 3] = -0.5
    weights[..., 0] = 0.25
    cancelled = torch.ones(1, 1, TOKENS, 2)
    cancelled[..., 0, :] = 2
    share, norm, rank = measure_heads(weights, cancelled)[:, 0].tolist()
    assert (share, norm, rank) == pytest.approx((2 / 3, 9 / 10, 0))


def test_heads_that_share_values_and_images_with_their_own_sinks() -> None:
    """Four heads over two heads of values, the sink at another key in each image; numbers are means over images."""
    weights = torch.stack([attention(sink).expand(4, TOKENS, TOKENS) for sink in SINKS])[:, None]
    of_values = torch.stack([torch.stack([values(sink, 0.1), values(sink, 2.0)]) for sink in SINKS])[:, None]
    rows = heads(Model(Layer(Valued(weights, of_values), torch.zeros(1, TOKENS, 4))), images=3)
    assert [row['value_norm'] for row in rows] == pytest.approx([0.1, 0.1, 2.0, 2.0], rel=0.02)
    assert [row['kind'] for row in rows] == ['no-op', 'no-op', 'broadcast', 'broadcast']


def test_windows_are_as_images() -> None:
    weights = torch.stack([attention(sink) for sink in SINKS])[None, :, None]
    of_values = torch.stack([values(sink, 0.2) for sink in SINKS])[None, :, None]
    (row,) = heads(Model(Layer(Valued(weights, of_values), torch.zeros(1, TOKENS, 4))))
    assert row['value_norm'] == pytest.approx(0.2) and row['kind'] == 'no-op'


def test_a_single_key_has_no_others() -> None:
    _, norm, _ = measure_heads(torch.ones(1, 1, 3, 1), torch.ones(1, 1, 1, 4))[:, 0].tolist()
    assert math.isnan(norm)


def test_attention_without_readable_values_is_left_out() -> None:
    weights = torch.full((1, 1, 2, TOKENS, TOKENS), 1 / TOKENS)
    assert heads(Model(Layer(Given(weights), torch.zeros(1, TOKENS, 4)))) == []


@pytest.mark.parametrize(
    ('numbers', 'kind'),
    [
        ((0.29, 0.1, 1.0), 'no sink'),
        ((0.3, 0.49, 1.0), 'no-op'),
        ((0.3, 0.5, 1.99), 'broadcast'),
        ((0.9, 0.5, 2.0), 'unclear'),
        ((0.49, 0.1, 1.0, 0.25), 'no sink'),
        ((0.5, 0.1, 1.0, 0.25), 'no-op'),
        ((1.0, 0.1, 1.0, 1.0), 'no sink'),
    ],
)
def test_limits_of_kinds(numbers: tuple[float, ...], kind: str) -> None:
    assert kind_of_sink(*numbers) == kind


def test_the_description_counts_and_names_sinks() -> None:
    model = Model(
        layer([attention(2), attention(5), attention(None)], [values(2, 0.05), values(5, 3.0), values(None, 1)])
    )
    first, *named = describe_sinks('vit', heads(model)).splitlines()
    assert first.startswith(
        'vit: 2 of 3 heads have a sink (a key with 0.3 of the attention): 1 no-op, which gates cure; '
    )
    assert '1 broadcast, which registers are for; 0 unclear' in first
    assert [line.strip().partition(' (')[0] for line in named] == [
        'layers.0.attn, head 0: no-op',
        'layers.0.attn, head 1: broadcast',
    ]
    assert named[0].endswith("(share 0.73, value 0.05 of the others', rank 4.4 of 8)")
