"""Sampling points land where they are, worked out by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import mmgate  # noqa: F401
from mmgate.analysis.probes.sampling import (
    SamplingChange,
    SamplingPoints,
    density,
    layers_of,
    query_at,
)
from mmgate.errors import ConfigError

SHAPES = torch.tensor([[4, 6], [2, 3]])
REST = ('weights', 'reference', 'queries', 'levels', 'is_encoder')


def kept(**readings: torch.Tensor) -> dict[str, dict[str, Any]]:
    """Return a recording of one layer."""
    return dict(layer={name: SimpleNamespace(last=x) for name, x in readings.items()})


@pytest.mark.parametrize(
    ('pixel', 'level', 'query'), [((100, 13), 0, 6 + 1), ((199, 49), 1, 24 + 3 + 1), (None, 0, 2 * 6 + 1)], ids=str
)
def test_a_query_is_that_of_the_pixel_on_its_level(pixel: Any, level: int, query: int) -> None:
    """An image of 200 x 50, scaled by (0.5, 2), fills the left half of its batch."""
    given = dict(img_shape=(100, 100), scale_factor=(0.5, 2.0), batch_input_shape=(100, 200))
    sample = SimpleNamespace(get=given.get, img_shape=(100, 100), ori_shape=(50, 200))
    layers = kept(spatial_shapes=SHAPES)
    assert query_at(layers, 'layer', sample, pixel, level) == query


def test_an_encoder_has_as_many_queries_as_its_levels_have_pixels() -> None:
    for queries, part in ((30, 'encoder'), (29, 'decoder')):
        layers = kept(spatial_shapes=SHAPES, locations=torch.zeros(1, queries, 1, 2, 1, 2))
        assert [name for name in ('encoder', 'decoder') if layers_of(layers, name)] == [part]


def test_density_lies_where_the_weights_are() -> None:
    """Points on one line have none."""
    rng = np.random.default_rng(0)
    xy = np.stack([rng.normal((25, 75), 3, (50, 2)), rng.normal((75, 25), 3, (50, 2))])
    found = density(xy, np.repeat([[0.01], [1.0]], 50, 1), (100, 100))
    assert found is not None
    row, column = np.unravel_index(found.argmax(), found.shape)
    assert abs(row / 95 - 0.25) < 0.05 and abs(column / 95 - 0.75) < 0.05
    assert density(np.ones((4, 2)), np.ones(4), (50, 100)) is None


def points(weights: list[float], *, x: float = 0.0, query: int = 5) -> SamplingPoints:
    """Return two points of one query, head and level."""
    xy = np.array([[x, 1.0], [x, 2.0]]).reshape(1, 1, 1, 2, 2)
    of_points = np.array(weights).reshape(1, 1, 1, 2)
    return SamplingPoints('layer', xy, of_points, np.array([[x, 0.0]]), np.array([query]), [0], False)


def test_what_one_point_gains_another_loses() -> None:
    change = SamplingChange(points([0.5, 0.5]), points([0.7, 0.3], x=3.0))
    np.testing.assert_allclose(change.weights.ravel(), [0.2, -0.2])
    assert change.moved == pytest.approx(0.2) and change.apart == 3
    rows = list(change.rows())
    assert [round(row['change'], 6) for row in rows] == [0.2, -0.2]
    assert (rows[1]['x'], rows[1]['x_before'], rows[1]['weight_before'], rows[1]['query']) == (3, 0, 0.5, 5)
    assert SamplingChange(points([0.5, 0.5]), points([0.5, 0.5])).moved == 0


def test_points_of_other_queries_have_no_difference() -> None:
    with pytest.raises(ConfigError, match=r'layer, queries \[5\], .* and layer, queries \[6\]'):
        SamplingChange(points([0.5, 0.5]), points([0.5, 0.5], query=6))


def test_points_that_are_not_there_count_for_nothing() -> None:
    """The first of two levels has one point of two; its padding has no place, no weight and no row."""

    def of(x: float, first: float) -> SamplingPoints:
        xy = np.array([[[[[x, 0.0], [np.nan, np.nan]], [[x, 1.0], [x, 2.0]]]]])
        weights = np.array([[[[first, 0.0], [1 - first, 0.0]]]])
        return SamplingPoints('layer', xy, weights, np.zeros((1, 2)), np.array([0]), [1, 0], False)

    change = SamplingChange(of(0.0, 0.5), of(3.0, 0.6))
    assert change.shifted == pytest.approx(3) and change.moved == pytest.approx(0.1)
    assert [(row['level'], row['point'], row['x']) for row in change.rows()] == [(1, 0, 3), (0, 0, 3), (0, 1, 3)]
    whole = SamplingPoints('layer', np.zeros((1, 1, 2, 2, 2)), *[getattr(of(0, 0), name) for name in REST])
    with pytest.raises(ConfigError, match=r'\[1, 2\] on levels \[1, 0\] and .* \[2, 2\] on levels'):
        SamplingChange(of(0.0, 0.5), whole)
