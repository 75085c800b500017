"""Maps drawn over their image."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
from mmengine.structures import BaseDataElement

from mmgate.analysis.figures.maps import draw_maps


def test_inhibition_has_its_own_colour(tmp_path: Path) -> None:
    """An excited map is red throughout, an inhibited one blue, on an image without colours."""
    cv2.imwrite(str(tmp_path / 'image.png'), np.full((40, 40, 3), 128, np.uint8))
    sample = BaseDataElement(metainfo=dict(img_path=str(tmp_path / 'image.png'), img_shape=(40, 40)))
    maps = [('excited', np.ones((4, 4))), ('inhibited', -np.ones((4, 4)))]
    picture = cv2.imread(str(draw_maps(sample, maps, tmp_path / 'maps.png', columns=3, label='attention'))).astype(int)
    redness = (picture[..., 2] - picture[..., 0])[:, : picture.shape[1] * 4 // 5]  # left of the scale
    half = redness.shape[1] * 2 // 3
    assert redness[:, :half].max() > 50 and redness[:, :half].min() > -20 and redness[:, half:].min() < -50


def test_a_long_title_takes_no_room_from_the_maps(tmp_path: Path) -> None:
    cv2.imwrite(str(tmp_path / 'image.png'), np.full((40, 40, 3), 128, np.uint8))
    sample = BaseDataElement(metainfo=dict(img_path=str(tmp_path / 'image.png'), img_shape=(40, 40)))
    coloured = []
    for title in ('head 0', 'a_model_of_a_very_long_name_' * 4):
        maps = [(title, np.ones((4, 4))), ('next', -np.ones((4, 4)))]
        picture = cv2.imread(str(draw_maps(sample, maps, tmp_path / 'maps.png', columns=5, label='attention')))
        redness = picture[..., 2].astype(int) - picture[..., 0]
        coloured.append((abs(redness) > 50).sum())
    assert coloured[1] > 0.8 * coloured[0]
