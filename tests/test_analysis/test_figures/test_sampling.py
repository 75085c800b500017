"""Sampling points drawn on their image: the points that gain weight, and those that lose some, on a close-up."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest

from mmgate.analysis.figures import sampling
from mmgate.analysis.figures.sampling import draw_difference
from mmgate.analysis.probes.sampling import SamplingChange, SamplingPoints


def points(weights: list[float], *, wide: float = 10.0) -> SamplingPoints:
    """Return a point left and a point right of the middle of an image of 200 x 100."""
    xy = np.array([[100 - wide, 50.0], [100 + wide, 50.0]]).reshape(1, 1, 1, 2, 2)
    of_points = np.array(weights).reshape(1, 1, 1, 2)
    return SamplingPoints('layer', xy, of_points, np.array([[100.0, 50.0]]), np.array([0]), [0], False)


def test_a_gain_is_red_and_a_loss_is_blue(tmp_path: Path) -> None:
    """In the third panel: the left point gains, the right one loses; with the change turned, colours are, too."""
    image = str(tmp_path / 'image.png')
    cv2.imwrite(image, np.full((100, 200, 3), 128, np.uint8))
    before = points([0.5, 0.5])
    for weights, sign in (([0.9, 0.1], 1), ([0.1, 0.9], -1)):
        change = SamplingChange(before, points(weights))
        out = draw_difference(change, image, tmp_path / 'out.png', titles=('a', 'b'))
        picture = cv2.imread(str(out)).astype(int)
        redness = sign * (picture[..., 2] - picture[..., 0])
        panel = redness[: picture.shape[0] * 3 // 5, picture.shape[1] * 2 // 3 :]
        half = panel.shape[1] // 2
        assert panel[:, :half].max() > 100 and panel[:, half:].min() < -100
        assert panel[:, :half].min() > -40 and panel[:, half:].max() < 40


def test_rounding_is_drawn_small(tmp_path: Path) -> None:
    """A change of 1e-8 has no large dots; one of a thousandth of the largest weight has."""
    image = str(tmp_path / 'image.png')
    cv2.imwrite(image, np.full((100, 200, 3), 128, np.uint8))

    def reddest(change: float) -> int:
        found = SamplingChange(points([0.5, 0.5]), points([0.5 + change, 0.5 - change]))
        picture = cv2.imread(str(draw_difference(found, image, tmp_path / 'out.png', titles=('a', 'b')))).astype(int)
        panel = (picture[..., 2] - picture[..., 0])[: picture.shape[0] * 3 // 5, picture.shape[1] * 2 // 3 :]
        return int((panel > 100).sum())

    assert reddest(1e-8) * 10 < reddest(5e-4)


def test_a_close_up_holds_the_points_and_has_the_shape_of_the_image() -> None:
    change = SamplingChange(points([0.5, 0.5]), points([0.6, 0.4]))
    left, right, top, bottom = sampling._window(change, 200, 100)
    assert (left + right, top + bottom) == (200, 100) and right - left == 2 * (bottom - top) == pytest.approx(24)
    # Points outside of the image leave the whole of it.
    wide = SamplingChange(points([0.5, 0.5], wide=150), points([0.5, 0.5], wide=150))
    assert sampling._window(wide, 200, 100) == (0, 200, 0, 100)
    # A point of hardly any weight does not count.
    light = SamplingChange(points([1.0, 0.01], wide=50), points([1.0, 0.01], wide=50))
    assert sampling._window(light, 200, 100)[1] < 150


def test_points_that_are_not_there_are_not_drawn(tmp_path: Path) -> None:
    """A level of one point, left, beside one of two: what gains is left."""
    image = str(tmp_path / 'image.png')
    cv2.imwrite(image, np.full((100, 200, 3), 128, np.uint8))
    xy = np.full((1, 1, 2, 2, 2), np.nan)
    xy[0, 0, 0, 0] = (90.0, 50.0)
    xy[0, 0, 1] = [[110.0, 50.0], [110.0, 54.0]]

    def of(weights: list[list[float]]) -> SamplingPoints:
        reference = np.array([[100.0, 50.0]])
        return SamplingPoints('a', xy, np.array(weights)[None, None], reference, np.array([0]), [0, 1], False)

    change = SamplingChange(of([[0.2, 0.0], [0.4, 0.4]]), of([[0.8, 0.0], [0.1, 0.1]]))
    assert np.isfinite(sampling._window(change, 200, 100)).all()
    out = draw_difference(change, image, tmp_path / 'out.png', titles=('a', 'b'))
    picture = cv2.imread(str(out)).astype(int)
    panel = (picture[..., 2] - picture[..., 0])[: picture.shape[0] * 3 // 5, picture.shape[1] * 2 // 3 :]
    assert panel[:, : panel.shape[1] // 2].max() > 100
