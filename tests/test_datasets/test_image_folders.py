"""Image folders for classification: deterministic, in ImageNet's layout."""

from __future__ import annotations

from pathlib import Path

import cv2
import pytest
from conftest import needs_mmpretrain

from mmgate.datasets.image_folders import render_object, write_digits, write_shapes_folder
from mmgate.datasets.shapes import CLASSES

COUNTS = dict(num_train=12, num_val=6)


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob('*') if path.is_file()}


def test_shapes_are_the_same_whatever_their_number(tmp_path: Path) -> None:
    assert write_shapes_folder(tmp_path / 'few', **COUNTS) and not write_shapes_folder(tmp_path / 'few', **COUNTS)
    write_shapes_folder(tmp_path / 'more', num_train=18, num_val=6)
    few, more = content(tmp_path / 'few'), content(tmp_path / 'more')
    assert {path.split('/')[1] for path in few if path.startswith('train')} == set(CLASSES)
    images = [path for path in few if path.endswith('.jpg')]
    assert len(images) == 18 and all(few[path] == more[path] for path in images)
    assert (render_object(0, 0) != render_object(0, 0, split='val')).any()


def test_what_exists_is_kept(tmp_path: Path) -> None:
    write_shapes_folder(tmp_path / 'shapes', **COUNTS)
    with pytest.raises(FileExistsError, match='choose another folder or pass force'):
        write_shapes_folder(tmp_path / 'shapes', seed=1, **COUNTS)
    assert write_shapes_folder(tmp_path / 'shapes', seed=1, force=True, **COUNTS)
    (tmp_path / 'other').mkdir()
    (tmp_path / 'other/precious').write_text('x')
    with pytest.raises(FileExistsError, match='no data set of this kind'):
        write_shapes_folder(tmp_path / 'other', force=True, **COUNTS)
    with pytest.raises(ValueError, match='num_train'):
        write_shapes_folder(tmp_path / 'none', num_train=3)


def test_digits(tmp_path: Path) -> None:
    pytest.importorskip('sklearn', reason='the digits come with scikit-learn')
    assert write_digits(tmp_path / 'digits') and not write_digits(tmp_path / 'digits')
    counts = [len(list((tmp_path / f'digits/{split}').glob('*/*.png'))) for split in ('train', 'val')]
    assert sum(counts) == 1797 and abs(counts[1] / 1797 - 0.2) < 0.01
    assert cv2.imread(str(next((tmp_path / 'digits/val/7').iterdir()))).shape == (32, 32, 3)


@needs_mmpretrain
def test_mmpretrain_reads_them(tmp_path: Path) -> None:
    from mmpretrain.datasets import CustomDataset

    write_shapes_folder(tmp_path / 'shapes', **COUNTS)
    classes = sorted(CLASSES)  # a folder's place in the alphabet is its label
    data = CustomDataset(data_root=str(tmp_path / 'shapes'), data_prefix='train', metainfo=dict(classes=classes))
    assert len(data) == 12
    for info in map(data.get_data_info, range(len(data))):
        assert Path(info['img_path']).parent.name == classes[info['gt_label']]
