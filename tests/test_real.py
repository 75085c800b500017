"""The converters write the layouts that the recipes on real images read."""

from __future__ import annotations

import json
from pathlib import Path

import cv2
import pytest
from helpers.made_data import bccd, camvid, write_segnet, write_voc

from mmgate.errors import ConfigError


def test_bccd(tmp_path: Path) -> None:
    """Boxes are x, y, width, height; one without an area is left out; each image is in one split."""
    root = tmp_path / 'bccd'
    bccd.main([str(write_voc(tmp_path / 'voc')), str(root)])
    content = {split: json.loads((root / f'annotations/{split}.json').read_text()) for split in ('train', 'val')}
    assert [len(content[split]['images']) for split in ('train', 'val')] == [4, 2]
    first, second = content['val']['annotations'][:2]
    assert (first['bbox'], first['area'], first['category_id']) == ([30.0, 20.0, 60.0, 50.0], 3000.0, 2)
    assert (second['bbox'], second['category_id'], second['image_id']) == ([100.0, 60.0, 40.0, 40.0], 1, 0)
    assert len(content['train']['annotations']) == 8 and len(list((root / 'images').iterdir())) == 6
    with pytest.raises(ConfigError, match="a box of class 'cell'"):
        bccd.convert(write_voc(tmp_path / 'strange', 'cell'), tmp_path / 'out')
    with pytest.raises(ConfigError, match=r'no .*trainval.txt. Give the folder BCCD'):
        bccd.convert(root, tmp_path / 'out')


def test_camvid(tmp_path: Path) -> None:
    """Void is 255, and the test by day has a folder of its own."""
    root = tmp_path / 'camvid'
    camvid.main([str(write_segnet(tmp_path / 'segnet')), str(root)])
    label = cv2.imread(str(root / 'labels/test/0001TP_008550.png'), cv2.IMREAD_UNCHANGED)
    assert label.shape == (36, 48) and sorted(set(label.flatten().tolist())) == [*range(11), 255]
    assert [path.name for path in (root / 'images/test').iterdir()] == ['0001TP_008550.jpg']
    assert [path.name for path in (root / 'labels/test_day').iterdir()] == ['Seq05VD_f00000.png']
    with pytest.raises(ConfigError, match='is no map of the classes 0 to 11'):
        camvid.convert(write_segnet(tmp_path / 'strange', highest=12), tmp_path / 'out')
    with pytest.raises(ConfigError, match='there is no image in'):
        camvid.convert(root, tmp_path / 'out')
