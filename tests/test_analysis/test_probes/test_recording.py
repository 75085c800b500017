"""What figures need beside the notes of attention: places, class tokens, queries, gates' maps, sampling points."""

from __future__ import annotations

from dataclasses import astuple
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.gated_layers import HEADS, PLUG, SDPA, TOKENS, gated
from mmdet.models.backbones.pvt import SpatialReductionAttention
from mmdet.models.backbones.swin import ShiftWindowMSA
from mmseg.models.backbones.twins import LocallyGroupedSelfAttention
from torch import nn

import mmgate
from mmgate.analysis.figures.gates import _apart
from mmgate.analysis.probes.gates import EDGES, RunningStatistics, gate_statistics, mean_maps
from mmgate.analysis.probes.recording import best_queries, class_tokens, map_shape, predicted, record
from mmgate.analysis.probes.sampling import SamplingChange, SamplingPoints, chosen_points, density, query_at
from mmgate.errors import ConfigError

IMAGE, MAP = torch.zeros(1, 24, 16), (4, 6)
PLACES: dict[str, tuple[nn.Module, list[int]]] = {
    'windows': (ShiftWindowMSA(16, 2, 4, shift_size=2), [4, 6, 4, 2]),
    'reduced keys': (SpatialReductionAttention(16, 2, sr_ratio=2), [4, 6, 2]),
    'grouped': (LocallyGroupedSelfAttention(16, 2, window_size=3), [4, 6, 3, 0]),
}


@pytest.mark.parametrize('name', PLACES)
def test_a_call_tells_where_windows_and_reduced_keys_lie(name: str) -> None:
    """By place or by name, and where a function that takes anything is set on the module."""
    module, expected = PLACES[name]
    with record(module, ['geometry', 'activation']) as recording:
        module(IMAGE, MAP)
        module(IMAGE, hw_shape=MAP)
        module.forward = lambda *args, **kwargs: type(module).forward(module, *args, **kwargs)
        module(IMAGE, MAP)
        found = [place.tolist() for place in recording['']['geometry'].tensors]
    del module.forward
    assert found == [expected] * 3
    assert not any(part._forward_hooks for part in module.modules())


def test_attention_over_the_whole_map_tells_its_place_itself() -> None:
    model = nn.ModuleList([ShiftWindowMSA(16, 2, 4, shift_size=2)])
    mmgate.swap_attention(model, dict(path='0', type='AgentAttention', map_size=MAP, agent_num=4))
    with record(model) as recording:
        model[0](IMAGE, MAP)
    assert [found.tolist() for found in recording['0']['geometry'].tensors] == [[4, 6, 1]]
    with mmgate.gates_disabled(model), record(model) as recording:
        model[0](IMAGE, MAP)
    assert [found.tolist() for found in recording['0']['geometry'].tensors] == [[4, 6, 4, 2]]


def test_a_map_has_the_shape_that_a_stride_makes() -> None:
    """Of padded images exactly, of others with the last row and column rounded up or left out."""
    for tokens, expected in ((16700, (100, 167)), (1050, (25, 42)), (49, None), (50 * 83, (50, 83))):
        assert map_shape(tokens, (800, 1333)) == expected


def test_class_tokens_join_where_they_join() -> None:
    """T2T-ViT's first attentions have none; DeiT's distillation token is one more."""
    model: Any = nn.ModuleDict(dict(backbone=nn.Module(), neck=nn.Identity()))
    model['backbone'].cls_token = nn.Parameter(torch.zeros(1))
    keys = {'backbone.tokens.0': 64, 'backbone.layers.0': 17, 'backbone.layers.1': 17, 'neck': 17}
    assert class_tokens(model, keys) == {'backbone.layers.0': 1, 'backbone.layers.1': 1}
    model['backbone'].num_extra_tokens = 2
    assert set(class_tokens(model, keys).values()) == {2}
    model['backbone'].with_cls_token = False  # mmseg's ViT keeps the parameter
    assert not class_tokens(model, keys)


@pytest.mark.parametrize('use_sigmoid', [True, False])
def test_best_queries_are_those_of_the_best_class_of_the_last_layer(use_sigmoid: bool) -> None:
    """By a softmax the last class is the background."""
    head = nn.Module()
    head.loss_cls = SimpleNamespace(use_sigmoid=use_sigmoid)
    head.forward = lambda classes, places: (classes, places)  # type: ignore[method-assign]
    classes = torch.tensor([[-2.0, 1.0, -9.0], [4.0, 0.0, -9.0], [0.0, 0.0, 8.0]]).expand(1, 1, 3, 3)
    places = torch.rand(2, 1, 3, 4)
    with record(nn.ModuleDict(dict(bbox_head=head)), ['predictions']) as recording:
        head(torch.cat([-classes, classes]), places)
    found = predicted(recording)
    assert found is not None and torch.equal(found[1], places[-1])
    expected = classes[0].sigmoid() if use_sigmoid else classes[0].softmax(-1)[..., :-1]
    torch.testing.assert_close(found[0], expected)
    assert best_queries(recording, 0, 2).tolist() == ([2, 1] if use_sigmoid else [1, 0])
    assert best_queries({}, 0, 2).tolist() == [0, 1]


DIFFERENTIAL = dict(type='DifferentialV2MultiheadAttention', init='identity')
# options of the gate, what its map is of, the map's shape for two layers, and the gate that changes nothing
GATES: dict[str, tuple[dict[str, Any], str, tuple[int, int], int | None]] = {
    'plug': (PLUG, 'pairs', (TOKENS, TOKENS), 0),
    'plug_without_residual': (dict(PLUG, residual=False, activation='none'), 'pairs', (TOKENS, TOKENS), 1),
    'sdpa': (SDPA, 'heads', (2, HEADS), 1),
    'differential_v2_identity': (DIFFERENTIAL, 'heads', (2, HEADS), None),
}


@pytest.mark.parametrize('name', GATES)
def test_a_gate_has_its_mean_map(name: str) -> None:
    options, kind, shape, unchanged = GATES[name]
    gates = gate_statistics(*gated(options))
    assert [gate.path for gate in gates] == ['0', '1'] and {gate.axes for gate in gates} == {kind}
    (found,) = mean_maps(gates)
    assert found.values.shape == shape and found.axes == kind and list(found.gates) == gates
    assert {gate.unchanged for gate in gates} == {unchanged} == {found.unchanged}
    if 'plug' in name:
        assert (found.values == unchanged).all()  # an identity's
    else:
        np.testing.assert_allclose(found.values.mean(1), [gate.statistics.mean for gate in gates], atol=1e-5)


def test_a_map_of_pairs_keeps_each_pair_and_the_class_token_apart() -> None:
    """A self-interaction of -1 stays one, beside a class token of 0.5, in the values, the rows and the picture."""
    model, _ = gated(PLUG)
    model.cls_token = nn.Parameter(torch.zeros(1))
    gate = torch.zeros(1, 1, 1 + TOKENS, 1 + TOKENS)
    gate[..., range(1, 7), range(1, 7)] = -1
    gate[:, :, 0] = 0.5
    for layer in model:
        layer.gate.gml.forward = lambda raw: gate[..., : raw.shape[-1], : raw.shape[-1]]
    images = [torch.randn(1, tokens, 8) for tokens in (1 + TOKENS, 1 + TOKENS, 4)]  # the last has other pairs
    (found,) = mean_maps(gate_statistics(model, images))
    np.testing.assert_array_equal(found.values, gate[0, 0])
    assert found.class_tokens == 1
    rows = {(row['row'], row['column']): row['gate'] for row in found.rows()}
    assert rows['class', 3] == 0.5 and rows[2, 2] == -1 and rows[2, 3] == rows[2, 'class'] == 0
    shown = _apart(found)
    np.testing.assert_array_equal(shown[2:, 2:], gate[0, 0, 1:, 1:])
    assert (shown[0, 2:] == 0.5).all() and np.isnan(shown[1]).all() and np.isnan(shown[:, 1]).all()


def test_a_gate_shared_by_the_heads_has_no_map() -> None:
    gates = gate_statistics(*gated(dict(type='SDPAGatedMultiheadAttention', head_shared='average')))
    assert len(gates) == 2 and mean_maps(gates) == []


def test_running_statistics_are_numpys() -> None:
    """Over parts of any sizes, with values outside of the histogram and infinite ones."""
    rng = np.random.default_rng(0)
    parts = [rng.normal(0.3, 2.0, size) for size in (1, 100, 7)]
    numbers = np.concatenate(parts)
    statistics = RunningStatistics()
    for part in parts:
        statistics.add(torch.tensor(part))
    statistics.add(torch.tensor([float('nan'), float('inf')]))
    assert statistics.count == 108
    assert statistics.mean == pytest.approx(numbers.mean()) and statistics.deviation == pytest.approx(numbers.std())
    assert statistics.sparsity == pytest.approx((abs(numbers) < 0.1).mean())
    assert (statistics.minimum, statistics.maximum) == (numbers.min(), numbers.max())
    expected, _ = np.histogram(numbers.clip(-4, 4), EDGES)
    assert abs(statistics.histogram - expected).sum() <= 2  # a number on an edge


# An image of 200 x 50, scaled by (0.5, 2), fills the left half of its batch.
GIVEN = dict(img_shape=(100, 100), scale_factor=(0.5, 2.0), batch_input_shape=(100, 200))
SAMPLE = SimpleNamespace(get=GIVEN.get, img_shape=(100, 100), ori_shape=(50, 200))


def noted(**values: Any) -> dict[str, Any]:
    return {name: SimpleNamespace(last=torch.tensor(value)) for name, value in values.items()}


@pytest.mark.parametrize(
    ('pixel', 'level', 'query'), [((100, 13), 0, 6 + 1), ((199, 49), 1, 24 + 3 + 1), (None, 0, 2 * 6 + 1)], ids=str
)
def test_a_query_is_that_of_the_pixel_on_its_level(pixel: Any, level: int, query: int) -> None:
    layers = dict(layer=noted(spatial_shapes=[[4, 6], [2, 3]]))
    assert query_at(layers, 'layer', SAMPLE, pixel, level) == query


def test_the_best_querys_points_and_box_are_in_pixels_of_the_image() -> None:
    """Points are shares of the padded batch, boxes of the image in it."""
    layer = noted(
        locations=[[[[[[0.0, 0.0]]]], [[[[0.25, 0.5]]]]]],
        weights=[[[[[1.0]]], [[[0.75]]]]],
        reference_points=[[[[0.0, 0.0]], [[0.5, 0.25]]]],
        spatial_shapes=[[4, 6]],
    )
    head = noted(scores=[[[0.1], [0.9]]], places=[[[0.1, 0.1, 0.1, 0.1], [0.5, 0.5, 0.2, 0.4]]])
    found = chosen_points(dict(cross_attn=layer, bbox_head=head), SAMPLE, top_k=1)
    assert (found.path, found.queries.tolist(), found.weights.item()) == ('cross_attn', [1], 0.75)
    assert found.xy.ravel().tolist() == [100, 25] and found.reference.tolist() == [[200, 12.5]]
    assert found.boxes is not None
    np.testing.assert_allclose(found.boxes, [[80, 15, 120, 35]], rtol=1e-6)
    assert chosen_points(dict(cross_attn=layer), SAMPLE, queries=[0]).boxes is None


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
    one = astuple(of(0, 0))
    whole = SamplingPoints('layer', np.zeros((1, 1, 2, 2, 2)), *one[2:])
    with pytest.raises(ConfigError, match=r'\[1, 2\] on levels \[1, 0\] and .* \[2, 2\] on levels'):
        SamplingChange(of(0.0, 0.5), whole)
