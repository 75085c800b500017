"""The generated data sets: deterministic, right to the pixel, and never written over."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from conftest import ROOT, run_python
from image_folders import write_digits, write_shapes_folder
from pycocotools.coco import COCO
from shapes import render, write_shapes

COUNTS = dict(num_train=12, num_val=3)
OBJECTS = dict(num_train=12, num_val=6)


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob('*') if path.is_file()}


def test_plain_images_are_those_of_earlier_releases() -> None:
    """Whatever the number of images: each follows from the seed, the split, the size and its own number."""
    assert zlib.crc32(np.concatenate([render(i).image for i in range(4)]).tobytes()) == 1237789896


def test_hard_images_have_more_and_smaller_objects_and_things_that_are_none() -> None:
    plain, hard = ([render(i, difficulty=name) for i in range(20)] for name in ('plain', 'hard'))
    counts = [np.mean([len(scene.masks) for scene in scenes]) for scenes in (plain, hard)]
    areas = [np.mean([mask.sum() for scene in scenes for mask in scene.masks]) for scenes in (plain, hard)]
    # saturated pixels outside of every object: plain images have hardly any
    stray = [
        np.mean([(np.ptp(x.image.astype(int), -1)[~x.masks.any(0)] > 110).mean() for x in scenes])
        for scenes in (plain, hard)
    ]
    assert counts[1] > 2 * counts[0] and areas[1] < 0.5 * areas[0] and stray[1] > max(5 * stray[0], 0.02)


@pytest.mark.parametrize('difficulty, split, count', [('plain', 'val', 3), ('hard', 'train', 12)])
def test_annotations_are_right_to_the_pixel(difficulty: str, split: str, count: int, tmp_path: Path) -> None:
    root = tmp_path / 'shapes'
    assert write_shapes(root, difficulty=difficulty, **COUNTS)
    coco = COCO(str(root / f'annotations/instances_{split}.json'))
    ade = {'train': 'training', 'val': 'validation'}[split]
    assert len(coco.imgs) == count
    for index in range(count):
        scene = render(index, split=split, difficulty=difficulty)
        semantic = cv2.imread(str(root / f'ade/annotations/{ade}/{index:06d}.png'), cv2.IMREAD_UNCHANGED)
        annotations = coco.imgToAnns[index + 1]
        assert (scene.masks.sum(0) <= 1).all(), 'two objects share a pixel'
        expected = np.zeros((128, 128), np.uint8)
        for annotation, mask, label in zip(annotations, scene.masks, scene.labels, strict=True):
            np.testing.assert_array_equal(coco.annToMask(annotation).astype(bool), mask)
            rows, columns = np.nonzero(mask)
            box = [columns.min(), rows.min(), np.ptp(columns) + 1, np.ptp(rows) + 1]
            assert annotation['bbox'] == box and annotation['area'] == mask.sum()
            assert annotation['category_id'] == label + 1
            expected[mask] = label + 1
        np.testing.assert_array_equal(semantic, expected)


@pytest.mark.parametrize(
    'write, counts', [(write_shapes, COUNTS), (write_shapes_folder, OBJECTS)], ids=['coco', 'imagenet']
)
def test_existing_folders_are_kept_or_refused(write: Any, counts: dict[str, int], tmp_path: Path) -> None:
    root = tmp_path / 'shapes'
    assert write(root, **counts)
    before = content(root)
    assert not write(root, **counts)
    with pytest.raises(FileExistsError, match='--force'):
        write(root, **counts, seed=5)
    assert content(root) == before
    (tmp_path / 'other').mkdir()
    (tmp_path / 'other/precious.txt').write_text('x')
    with pytest.raises(FileExistsError, match='no data set of this kind'):
        write(tmp_path / 'other', **counts, force=True)
    assert content(tmp_path / 'other') == {'precious.txt': b'x'}
    assert write(root, **counts, seed=5, force=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ['other', 'shapes']


@pytest.mark.parametrize(
    'write, arguments',
    [
        *((write_shapes, given) for given in (dict(num_train=0), dict(num_val=-1), dict(size=32), dict(seed=-1))),
        (write_shapes, dict(difficulty='odd')),
        (write_shapes_folder, dict(num_train=3)),
    ],
    ids=lambda value: getattr(value, '__name__', str(value)),
)
def test_bad_arguments_are_refused(write: Any, arguments: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match='must be'):
        write(tmp_path / 'x', **arguments)
    assert not list(tmp_path.iterdir())


def test_too_few_objects_are_refused_before_any_work(tmp_path: Path) -> None:
    make = [ROOT / 'tools/dataset_converters/make_shapes.py', tmp_path / 'out', '--num-objects', '29']
    assert '--num-objects must be 0, or 30 or more; got 29.' in run_python(*make, fails=True).stderr
    assert not list(tmp_path.iterdir())


def test_digits_are_written_once(tmp_path: Path) -> None:
    pytest.importorskip('sklearn', reason='the digits come with scikit-learn')
    assert write_digits(tmp_path / 'digits') and not write_digits(tmp_path / 'digits')
    counts = [len(list((tmp_path / f'digits/{split}').glob('*/*.png'))) for split in ('train', 'val')]
    assert sum(counts) == 1797 and abs(counts[1] / 1797 - 0.2) < 0.01
    assert cv2.imread(str(next((tmp_path / 'digits/val/7').iterdir()))).shape == (32, 32, 3)
