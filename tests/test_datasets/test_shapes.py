"""The generated data set: deterministic, right to the pixel, readable by the stock data sets."""

from __future__ import annotations

import json
import shutil
import zlib
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from mmdet.datasets import CocoDataset
from mmengine.registry import init_default_scope
from mmseg.datasets import BaseSegDataset
from pycocotools.coco import COCO

from mmgate.datasets import drawing, shapes
from mmgate.datasets.drawing import CLASSES
from mmgate.datasets.outlines import outlines
from mmgate.datasets.shapes import DIFFICULTIES, render, write_shapes

COUNTS = dict(num_train=12, num_val=3)


@pytest.fixture(scope='module')
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp('data') / 'shapes'
    assert write_shapes(folder, **COUNTS)
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob('*') if path.is_file()}


def test_same_seed_same_bytes_and_images_do_not_depend_on_the_count(root: Path, tmp_path: Path) -> None:
    write_shapes(tmp_path / 'again', **COUNTS)
    assert content(tmp_path / 'again') == content(root)
    write_shapes(tmp_path / 'more', num_train=13, num_val=3)
    assert (tmp_path / 'more/train/000003.jpg').read_bytes() == (root / 'train/000003.jpg').read_bytes()
    assert not np.array_equal(render(3).image, render(3, seed=1).image)
    assert not np.array_equal(render(3).image, render(3, split='val').image)


@pytest.fixture(scope='module')
def hard_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp('data') / 'hard'
    assert write_shapes(folder, **COUNTS, difficulty='hard')
    return folder


def test_plain_images_are_those_of_earlier_releases() -> None:
    assert zlib.crc32(np.concatenate([render(i).image for i in range(4)]).tobytes()) == 1237789896


def test_hard_images_have_more_smaller_hidden_objects_and_things_that_are_none() -> None:
    plain, hard = ([render(i, difficulty=name) for i in range(40)] for name in ('plain', 'hard'))
    count, area = (
        (lambda s: np.mean([len(x.masks) for x in s])),
        (lambda s: np.mean([m.sum() for x in s for m in x.masks])),
    )
    assert count(hard) > 2 * count(plain) and area(hard) < 0.5 * area(plain)
    # saturated pixels outside of every object: plain images have hardly any
    stray = [
        np.mean([(np.ptp(x.image.astype(int), -1)[~x.masks.any(0)] > 110).mean() for x in scenes])
        for scenes in (plain, hard)
    ]
    assert stray[1] > 5 * stray[0] and stray[1] > 0.02
    for scene in hard:
        assert (scene.masks.sum(0) <= 1).all(), 'two objects share a pixel'


@pytest.mark.parametrize('difficulty', DIFFICULTIES)
def test_masks_are_what_is_seen(monkeypatch: pytest.MonkeyPatch, difficulty: str) -> None:
    """Every surface in a colour of its own, so that the image says whose a pixel is; the later object lies on top."""
    levels = np.array([0, 85, 170, 255])  # so far apart that noise changes none
    labels: list[int] = []
    full: dict[int, np.ndarray] = {}

    def texture(rng: np.random.Generator, label: int, size: int) -> np.ndarray:
        labels.append(label)
        return np.full((size, size, 3), levels[list(np.unravel_index(len(labels), (4, 4, 4)))], float)

    def shape_mask(*args: Any) -> np.ndarray:
        full[len(labels) + 1] = drawing.shape_mask(*args)
        return full[len(labels) + 1]

    monkeypatch.setattr(shapes, 'texture', texture)
    monkeypatch.setattr(shapes, 'shape_mask', shape_mask)
    monkeypatch.setattr(shapes, 'background', lambda rng, size: np.zeros((size, size, 3)))
    hidden = 0
    for index in range(20):
        labels.clear()
        full.clear()
        scene = render(index, difficulty=difficulty)
        nearest = np.abs(scene.image[..., None].astype(int) - levels).argmin(-1)
        seen = np.ravel_multi_index(tuple(np.moveaxis(nearest, -1, 0)), (4, 4, 4))
        owners = []
        for mask, label in zip(scene.masks, scene.labels, strict=True):
            (owner,) = np.unique(seen[mask])
            np.testing.assert_array_equal(seen == owner, mask)
            assert labels[owner - 1] == label and not (mask & ~full[owner]).any()
            assert mask.sum() >= max(DIFFICULTIES[difficulty].min_visible * full[owner].sum(), 40)
            hidden += mask.sum() < full[owner].sum()
            owners.append(owner)
        assert owners == sorted(owners)
        rest = set(np.unique(seen)) - {0, *owners}
        assert not rest & set(full), 'an object without a mask'
        assert difficulty == 'hard' or not rest, 'plain images have no fragments'
    assert hidden > 3


def test_folders_of_releases_without_difficulty_are_known_again(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root, tmp_path / 'old')
    stamp = tmp_path / 'old/shapes.json'
    stamp.write_text(json.dumps({k: v for k, v in json.loads(stamp.read_text()).items() if k != 'difficulty'}))
    assert not write_shapes(tmp_path / 'old', **COUNTS)
    with pytest.raises(FileExistsError, match='--force'):
        write_shapes(tmp_path / 'old', **COUNTS, difficulty='hard')


@pytest.mark.parametrize('split, count', [('train', 12), ('val', 3)])
@pytest.mark.parametrize('difficulty', DIFFICULTIES)
def test_annotations_are_right_to_the_pixel(
    root: Path, hard_root: Path, difficulty: str, split: str, count: int
) -> None:
    root = {'plain': root, 'hard': hard_root}[difficulty]
    coco = COCO(str(root / f'annotations/instances_{split}.json'))
    ade = {'train': 'training', 'val': 'validation'}[split]
    assert len(coco.imgs) == count
    for index in range(count):
        scene = render(index, split=split, difficulty=difficulty)
        semantic = cv2.imread(str(root / f'ade/annotations/{ade}/{index:06d}.png'), cv2.IMREAD_UNCHANGED)
        annotations = coco.imgToAnns[index + 1]
        assert len(annotations) == len(scene.masks)
        expected = np.zeros((128, 128), np.uint8)
        for annotation, mask, label in zip(annotations, scene.masks, scene.labels, strict=True):
            decoded = coco.annToMask(annotation).astype(bool)
            np.testing.assert_array_equal(decoded, mask)
            rows, columns = np.nonzero(mask)
            box = [columns.min(), rows.min(), np.ptp(columns) + 1, np.ptp(rows) + 1]
            assert annotation['bbox'] == box and annotation['area'] == mask.sum()
            assert annotation['category_id'] == label + 1
            expected[mask] = label + 1
        np.testing.assert_array_equal(semantic, expected)


@pytest.mark.parametrize(
    'picture',
    [
        ['#'],
        ['###', '#.#', '###'],
        ['##.', '.##', '##.'],
        ['#.#', '###', '#.#'],
        ['#.', '.#'],
        ['####', '#..#', '#.##', '####'],
        ['####', '#.##', '##.#', '####'],
    ],
    ids=['pixel', 'hole', 'zigzag', 'h', 'diagonal', 'large_hole', 'holes_that_touch'],
)
def test_outlines_cover_exactly(picture: list[str]) -> None:
    mask = np.array([[c == '#' for c in row] for row in picture])
    coco = COCO()
    coco.imgs = {1: dict(height=mask.shape[0], width=mask.shape[1])}
    np.testing.assert_array_equal(coco.annToMask(dict(image_id=1, segmentation=outlines(mask))), mask)


def test_stock_datasets_read_it(root: Path) -> None:
    init_default_scope('mmdet')
    detection = CocoDataset(
        data_root=str(root),
        ann_file='annotations/instances_train.json',
        data_prefix=dict(img='train/'),
        metainfo=dict(classes=CLASSES),
        pipeline=[],
    )
    assert len(detection) == 12 and len(detection.get_data_info(1)['instances']) == len(render(1).labels)
    init_default_scope('mmseg')
    segmentation = BaseSegDataset(
        img_suffix='.jpg',
        reduce_zero_label=True,
        data_root=str(root / 'ade'),
        data_prefix=dict(img_path='images/training', seg_map_path='annotations/training'),
        metainfo=dict(classes=CLASSES, palette=[[i, i, i] for i in range(len(CLASSES))]),
        pipeline=[dict(type='LoadImageFromFile'), dict(type='LoadAnnotations', reduce_zero_label=True)],
    )
    assert len(segmentation) == 12
    sample = segmentation[2]
    scene = render(2)
    label_map = np.full((128, 128), 255)
    for mask, label in zip(scene.masks, scene.labels, strict=True):
        label_map[mask] = label
    np.testing.assert_array_equal(sample['gt_seg_map'], label_map)


def test_existing_folders_are_kept_or_refused(root: Path, tmp_path: Path) -> None:
    before = content(root)
    assert not write_shapes(root, **COUNTS)
    with pytest.raises(FileExistsError, match='--force'):
        write_shapes(root, **COUNTS, seed=5)
    assert content(root) == before
    foreign = tmp_path / 'coco'
    foreign.mkdir()
    (foreign / 'precious.txt').write_text('x')
    with pytest.raises(FileExistsError, match='no data set of this kind'):
        write_shapes(foreign, **COUNTS, force=True)
    assert content(foreign) == {'precious.txt': b'x'}
    write_shapes(tmp_path / 's', num_train=1, num_val=1)
    assert write_shapes(tmp_path / 's', num_train=2, num_val=1, force=True)
    assert json.loads((tmp_path / 's/shapes.json').read_text())['num_train'] == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ['coco', 's']


@pytest.mark.parametrize(
    'arguments',
    [dict(num_train=0), dict(num_val=-1), dict(size=32), dict(seed=-1), dict(difficulty='odd')],
    ids=lambda d: next(iter(d)),
)
def test_bad_arguments(arguments: dict, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match='must be'):
        write_shapes(tmp_path / 'x', **arguments)
    assert not list(tmp_path.iterdir())
