"""Pictures of gates, maps and sampling points: their scales, colours, titles and names of layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from helpers.gated_layers import HEADS, PLUG, SDPA, TOKENS, Model
from mmengine.structures import BaseDataElement
from torch import nn

import mmgate
from mmgate.analysis.figures import sampling, style
from mmgate.analysis.figures.gates import draw_gates
from mmgate.analysis.figures.maps import draw_maps
from mmgate.analysis.probes.gates import gate_statistics
from mmgate.analysis.probes.sampling import SamplingChange, SamplingPoints


def test_a_picture_of_gates_has_every_layer_of_every_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gates of pairs around 0 and of heads around 1 have a map each, centred there; so has a gate of fewer heads."""
    figures: list[Any] = []
    monkeypatch.setattr('mmgate.analysis.figures.style.save', lambda figure, out: figures.append(figure))
    long = 'a_part_of_the_model_with_a_long_name'
    model = Model([*(nn.MultiheadAttention(8, HEADS, batch_first=True) for _ in range(4))])
    model.append(nn.MultiheadAttention(8, 4, batch_first=True))
    mmgate.swap_attention(model, [dict(PLUG, path=['0', '2']), dict(SDPA, path=['1', '3', '4'])])
    listed = gate_statistics(model.eval(), [torch.randn(1, TOKENS, 8)])
    for gate in listed:
        gate.path = f'{long}.{gate.path}.{long}' if gate.path in '02' else f'{long}.{gate.path}'
    draw_gates([('both', listed), ('one', listed[:1])], tmp_path / 'x.png')
    rows = figures[0].axes[:10]
    maps = [axis for axis in rows if axis.images]
    found = [(sum(axis.images[0].get_clim()) / 2, axis.get_title().split('\n')[-1]) for axis in maps]
    one, two = 'mean gate of 1 layer', 'mean gate of 2 layers'
    assert found == [(0, two), (1, two), (1, one), (0, one)]
    names = [label.get_text() for label in rows[3].get_yticklabels()]
    assert names == [f'0.{long}', '1', f'2.{long}', '3', '4']
    assert [label.get_text() for label in rows[1].get_yticklabels()] == ['1', '3']


def redness(picture: Path) -> np.ndarray:
    values = cv2.imread(str(picture)).astype(int)
    return values[..., 2] - values[..., 0]


def test_inhibition_is_blue_and_a_long_title_takes_no_room_from_the_maps(tmp_path: Path) -> None:
    """An excited map is red throughout, an inhibited one blue, on an image without colours."""
    cv2.imwrite(str(tmp_path / 'image.png'), np.full((40, 40, 3), 128, np.uint8))
    sample = BaseDataElement(metainfo=dict(img_path=str(tmp_path / 'image.png'), img_shape=(40, 40)))
    coloured = []
    for title in ('excited', 'a_model_of_a_very_long_name_' * 4):
        maps = [(title, np.ones((4, 4))), ('inhibited', -np.ones((4, 4)))]
        found = redness(draw_maps(sample, maps, tmp_path / 'maps.png', columns=3, label='attention'))
        found = found[:, : found.shape[1] * 4 // 5]  # left of the scale
        excited, inhibited = np.split(found, [found.shape[1] * 2 // 3], axis=1)
        assert excited.max() > 50 and excited.min() > -20 and inhibited.min() < -50
        coloured.append((abs(found) > 50).sum())
    assert coloured[1] > 0.8 * coloured[0]


def points(weights: Any, *, wide: float = 10.0) -> SamplingPoints:
    """Return points left and right of the middle of an image of 200 x 100, a level each; a weight of NaN has none."""
    of_points = np.array(weights, float).reshape(1, 1, 2, -1)
    xy = np.zeros((*of_points.shape, 2)) + [100, 50]
    xy[..., 0] += [[[[-wide], [wide]]]]
    xy[np.isnan(of_points)] = np.nan
    return SamplingPoints('a', xy, np.nan_to_num(of_points), np.array([[100.0, 50.0]]), np.array([0]), [0, 1], False)


def halves(change: SamplingChange, folder: Path) -> list[np.ndarray]:
    """Draw a difference, and return how red the left and the right half of its third panel are."""
    cv2.imwrite(str(folder / 'image.png'), np.full((100, 200, 3), 128, np.uint8))
    found = redness(sampling.draw_difference(change, str(folder / 'image.png'), folder / 'out.png', titles=('a', 'b')))
    return np.array_split(found[: found.shape[0] * 3 // 5, found.shape[1] * 2 // 3 :], 2, axis=1)


@pytest.mark.parametrize(
    ('before', 'after', 'gains'),
    [
        ([0.5, 0.5], [0.9, 0.1], 'left'),
        ([0.5, 0.5], [0.1, 0.9], 'right'),
        ([[0.2, np.nan], [0.4, 0.4]], [[0.8, np.nan], [0.1, 0.1]], 'left'),  # a point that is not there
    ],
)
def test_a_gain_is_red_and_a_loss_blue(before: Any, after: Any, gains: str, tmp_path: Path) -> None:
    left, right = halves(SamplingChange(points(before), points(after)), tmp_path)
    won, lost = (left, right) if gains == 'left' else (right, left)
    assert won.max() > 100 and lost.min() < -100 and won.min() > -40 and lost.max() < 40


def test_rounding_is_drawn_small(tmp_path: Path) -> None:
    """A change of 1e-8 has no large dots; one of a thousandth of the largest weight has."""
    changes = (SamplingChange(points([0.5, 0.5]), points([0.5 + x, 0.5 - x])) for x in (1e-8, 5e-4))
    tiny, small = (halves(change, tmp_path)[0] for change in changes)
    assert (tiny > 100).sum() * 10 < (small > 100).sum()


def test_a_close_up_holds_the_points_and_has_the_shape_of_the_image() -> None:
    change = SamplingChange(points([0.5, 0.5]), points([0.6, 0.4]))
    left, right, top, bottom = sampling._window(change, 200, 100)
    assert (left + right, top + bottom) == (200, 100) and right - left == 2 * (bottom - top) == pytest.approx(24)
    # Points outside of the image leave the whole of it; a point of hardly any weight does not count.
    wide = SamplingChange(points([0.5, 0.5], wide=150), points([0.5, 0.5], wide=150))
    assert sampling._window(wide, 200, 100) == (0, 200, 0, 100)
    light = SamplingChange(points([1.0, 0.01], wide=50), points([1.0, 0.01], wide=50))
    assert sampling._window(light, 200, 100)[1] < 150


@pytest.mark.parametrize(
    ('paths', 'labels'),
    [
        (['backbone.layers.0.attn', 'backbone.layers.1.attn'], ['0', '1']),
        (['encoder.0.self_attn', 'decoder.0.attn'], ['encoder.0.self_attn', 'decoder.0.attn']),
        (['layers.0.self_attn.attn', 'layers.0.cross_attn.attn'], ['0.self_attn', '0.cross_attn']),
        (['a.attn'], ['a.attn']),
    ],
)
def test_labels_leave_out_what_all_share(paths: list[str], labels: list[str]) -> None:
    assert style.layer_labels(paths) == labels
