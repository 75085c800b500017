"""Transform of a data pipeline that adds noise to images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mmcv.transforms import BaseTransform

from mmgate.registry import TRANSFORMS

Image = np.ndarray


def _gaussian(image: Image, level: float) -> Image:
    return image + np.random.normal(0.0, 255 * level, image.shape)


def _uniform(image: Image, level: float) -> Image:
    return image + np.random.uniform(-255 * level, 255 * level, image.shape)


def _speckle(image: Image, level: float) -> Image:
    return image * (1 + np.random.normal(0.0, level, image.shape))


def _salt_and_pepper(image: Image, level: float) -> Image:
    # All channels of a pixel share one number.
    draw = np.random.uniform(size=image.shape[:2])
    image = image.copy()
    image[draw < level / 2] = 0
    image[draw > 1 - level / 2] = 255
    return image


def _shot(image: Image, level: float) -> Image:
    # With so many photons, the standard deviation of a white pixel is the level.
    photons = 1 / level**2
    return np.random.poisson(image / 255 * photons) / photons * 255


NOISES: dict[str, Callable[[Image, float], Image]] = {
    'gaussian': _gaussian,
    'uniform': _uniform,
    'speckle': _speckle,
    'salt_and_pepper': _salt_and_pepper,
    'shot': _shot,
}


@TRANSFORMS.register_module(force=True)
class RandomNoise(BaseTransform):
    """Transform that adds noise of a random kind and a random level to each image.

    The paper trains under "multiple distortion levels and noise types" and names none; these are the usual ones.

    Args:
        kinds: Some of :data:`NOISES`. ``'gaussian'`` and ``'uniform'`` are added, ``'speckle'`` is multiplied,
            ``'shot'`` is Poisson noise, ``'salt_and_pepper'`` turns pixels black or white.
        levels: Standard deviations relative to the range of a pixel (for ``'uniform'`` half the width, for ``'shot'``
            that of a white pixel), or the share of pixels for ``'salt_and_pepper'``; more than 0, at most 1.
        prob: Probability with which an image gets noise.

    Raises:
        ValueError: A kind is unknown, or a level or the probability is out of its range.

    Reads and writes ``img``, ``(H, W)`` or ``(H, W, C)``, 0 to 255; its dtype stays. The draws are numpy's, which
    mmengine seeds in every worker.

    Source: M-DGSA, section 5.1.
    """

    def __init__(
        self, kinds: Sequence[str] = ('gaussian',), levels: Sequence[float] = (0.1,), prob: float = 1.0
    ) -> None:
        # A string would be read as a list of letters.
        if isinstance(kinds, str) or not kinds or not set(kinds) <= set(NOISES):
            raise ValueError(f'kinds={kinds!r} must list some of {", ".join(NOISES)}.')
        if not levels or not all(0 < level <= 1 for level in levels):
            raise ValueError(f'levels={levels!r} must list numbers above 0, up to 1.')
        if not 0 <= prob <= 1:
            raise ValueError(f'prob={prob} must lie in 0 to 1.')
        self.kinds = tuple(kinds)
        self.levels = tuple(levels)
        self.prob = prob

    def transform(self, results: dict[str, Any]) -> dict[str, Any]:
        """Add noise to the image in ``results['img']`` and return the dict."""
        if np.random.uniform() >= self.prob:
            return results
        kind = np.random.choice(self.kinds)
        level = np.random.choice(self.levels)
        image = results['img']
        noisy = NOISES[str(kind)](image.astype(np.float64), float(level)).clip(0, 255)
        if np.issubdtype(image.dtype, np.integer):
            noisy = noisy.round()
        results['img'] = noisy.astype(image.dtype)
        return results

    def __repr__(self) -> str:
        return f'{type(self).__name__}(kinds={self.kinds}, levels={self.levels}, prob={self.prob})'
