"""Noise of several kinds and levels on images."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mmgate.datasets.noise import NOISES
from mmgate.registry import TRANSFORMS


def noisy(image: np.ndarray, **options: Any) -> np.ndarray:
    np.random.seed(0)
    transform = TRANSFORMS.build(dict(type='mmgate.RandomNoise', **options))
    return transform(dict(img=image.copy()))['img']


@pytest.mark.parametrize('dtype', [np.uint8, np.float32], ids=['uint8', 'float32'])
@pytest.mark.parametrize('kind', NOISES)
def test_noise_has_its_kinds_and_levels(kind: str, dtype: type) -> None:
    """A higher level is further from the image, whose dtype and range stay; a seed gives the same."""
    image = np.full((64, 64, 3), 128, dtype)
    distances = []
    for level in (0.05, 0.2):
        out = noisy(image, kinds=[kind], levels=[level])
        assert out.dtype == dtype and out.shape == image.shape and out.min() >= 0 and out.max() <= 255
        assert np.array_equal(out, noisy(image, kinds=[kind], levels=[level]))
        distances.append(np.abs(out.astype(float) - 128).mean())
    assert 0 < distances[0] < distances[1]


@pytest.mark.parametrize('kind, deviation', [('gaussian', 25.5), ('uniform', 25.5 / 3**0.5), ('speckle', 12.8)])
def test_noise_has_its_deviation(kind: str, deviation: float) -> None:
    out = noisy(np.full((256, 256), 128, np.float32), kinds=[kind], levels=[0.1])
    assert out.std() == pytest.approx(deviation, rel=0.02)


def test_salt_and_pepper_share_and_shot() -> None:
    out = noisy(np.full((256, 256, 3), 128, np.uint8), kinds=['salt_and_pepper'], levels=[0.2])
    assert ((out == 0) | (out == 255)).mean() == pytest.approx(0.2, abs=0.01)
    assert (out == out[..., :1]).all()  # a pixel, not a channel
    white = noisy(np.full((256, 256), 128, np.float64), kinds=['shot'], levels=[0.1])
    assert white.std() == pytest.approx(25.5 * (128 / 255) ** 0.5, rel=0.03)


def test_share_of_images_and_refusals() -> None:
    image = np.full((4, 4, 3), 128, np.uint8)
    transform = TRANSFORMS.build(dict(type='mmgate.RandomNoise', levels=[0.5], prob=0.25))
    np.random.seed(0)
    changed = sum(not np.array_equal(transform(dict(img=image.copy()))['img'], image) for _ in range(1000))
    assert 200 < changed < 300 and 'gaussian' in repr(transform)
    for options, message in (
        (dict(kinds=['fog']), "kinds=.'fog'. must list some of gaussian"),
        (dict(kinds='gaussian'), 'must list some of'),
        (dict(levels=[0]), 'numbers above 0'),
        (dict(prob=2), 'prob=2 must lie'),
    ):
        with pytest.raises(ValueError, match=message):
            TRANSFORMS.build(dict(type='mmgate.RandomNoise', **options))
