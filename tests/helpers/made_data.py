"""A few made samples of every data set that the configs read, under its authors' file names and in their layout."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from conftest import tool
from image_folders import write_digits, write_shapes_folder
from shapes import write_shapes

from helpers.image_sets import SETS, write_images
from mmgate._environment import available

bccd = tool('bccd', 'dataset_converters')
camvid = tool('camvid', 'dataset_converters')

BOX = '<object><name>{}</name><bndbox><xmin>{}</xmin><ymin>{}</ymin><xmax>{}</xmax><ymax>{}</ymax></bndbox></object>'
DAY = ('0006R0_f00930', '0016E5_00390')
DUSK = ('0001TP_006690', '0001TP_006720')
WIDTH, HEIGHT = 160, 120  # of images of COCO and ADE20K


def made_sets(factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield a folder with samples of every set, for a fixture of a module."""
    root = factory.mktemp('data')
    with pytest.MonkeyPatch.context() as patch:
        write_all(root, patch)
        yield root


def write_all(root: Path, patch: pytest.MonkeyPatch) -> None:
    """Write every set, and let mmpretrain take the made batches of CIFAR for those that are published."""
    data = root / 'data'
    write_coco(data / 'coco')
    write_ade20k(data / 'ade/ADEChallengeData2016')
    write_imagenet(data / 'imagenet')
    for name in SETS if available('mmpretrain') else ():
        folder = data / {'fashionmnist': 'fashion_mnist'}.get(name, name)
        folder.mkdir(parents=True)
        write_images(name, folder, patch)
    write_digits(data / 'digits')
    write_shapes(data / 'shapes', num_train=2, num_val=2, size=128)
    write_shapes(data / 'shapes_hard', num_train=2, num_val=2, size=128, difficulty='hard')
    write_shapes(data / 'shapes_256', num_train=2, num_val=2, size=128)
    write_shapes_folder(data / 'shapes/imagenet', num_train=6, num_val=6)
    bccd.main([str(write_voc(root / 'voc')), str(data / 'bccd')])
    camvid.main([str(write_segnet(root / 'segnet')), str(data / 'camvid')])
    write_facemask(data / 'facemask')


def noise(*shape: int) -> np.ndarray:
    """Return an image of this shape with a random number in each byte."""
    return np.random.default_rng(0).integers(0, 256, shape, np.uint8)


def write_coco(root: Path) -> None:
    """Write COCO 2017 with its 80 things and 53 kinds of stuff: instances, panoptic segments, images."""
    from mmdet.datasets import CocoDataset, CocoPanopticDataset

    things = CocoDataset.METAINFO['classes']
    stuff = CocoPanopticDataset.METAINFO['stuff_classes']
    categories = [dict(id=i + 1, name=name, isthing=int(name in things)) for i, name in enumerate((*things, *stuff))]
    boxes = [(0, 0, 160, 90), (10, 20, 60, 50), (70, 10, 80, 100)]  # x, y, width, height; the first is nearly all
    for split, first in (('train', 1), ('val', 11)):
        (root / f'{split}2017').mkdir(parents=True)
        (root / f'annotations/panoptic_{split}2017').mkdir(parents=True)
        images, instances, panoptic = [], [], []
        for number in (first, first + 1):
            name = f'{number:012}.jpg'
            cv2.imwrite(str(root / f'{split}2017/{name}'), noise(HEIGHT, WIDTH, 3))
            images.append(dict(id=number, file_name=name, width=WIDTH, height=HEIGHT))
            segments = np.zeros((HEIGHT, WIDTH), np.int64)
            found = []
            for place, (x, y, w, h) in enumerate([*boxes, (0, 110, 160, 10)]):
                category = 81 if place == len(boxes) else 1 + 3 * place
                one = dict(id=100 * number + place, category_id=category, bbox=[x, y, w, h], area=w * h, iscrowd=0)
                segments[y : y + h, x : x + w] = one['id']
                found.append(one)
                if place < len(boxes):
                    corners = [x, y, x + w, y, x + w, y + h, x, y + h]
                    instances.append(one | dict(image_id=number, segmentation=[corners]))
            # a colour is the number of a segment to the base of 256, red first; OpenCV writes blue first
            colours = np.stack([segments >> shift & 255 for shift in (16, 8, 0)], -1).astype(np.uint8)
            cv2.imwrite(str(root / f'annotations/panoptic_{split}2017/{number:012}.png'), colours)
            panoptic.append(dict(image_id=number, file_name=f'{number:012}.png', segments_info=found))
        write_json(root / f'annotations/instances_{split}2017.json', images, instances, categories[:80])
        write_json(root / f'annotations/panoptic_{split}2017.json', images, panoptic, categories)


def write_json(path: Path, images: list[Any], annotations: list[Any], categories: list[Any]) -> None:
    """Write a file of annotations in COCO's layout."""
    path.write_text(json.dumps(dict(images=images, annotations=annotations, categories=categories)))


def write_ade20k(root: Path) -> None:
    """Write ADE20K's training and validation images with the labels 1, 150, 0 (void) and 75."""
    for split, short in (('training', 'train'), ('validation', 'val')):
        (root / f'images/{split}').mkdir(parents=True)
        (root / f'annotations/{split}').mkdir(parents=True)
        for number in (1, 2):
            name = f'ADE_{short}_{number:08}'
            cv2.imwrite(str(root / f'images/{split}/{name}.jpg'), noise(HEIGHT, WIDTH, 3))
            label = np.repeat(np.array([1, 150, 0, 75], np.uint8), WIDTH // 4)[None].repeat(HEIGHT, 0)
            cv2.imwrite(str(root / f'annotations/{split}/{name}.png'), label)


def write_imagenet(root: Path) -> None:
    """Write two images of each of two classes of ImageNet for each split, with mmpretrain's lists."""
    (root / 'meta').mkdir(parents=True)
    for split in ('train', 'val'):
        lines = []
        for label, folder in enumerate(('n01440764', 'n01443537')):
            (root / split / folder).mkdir(parents=True)
            for number in (1, 2):
                name = f'{folder}/{folder}_{number}.JPEG'
                cv2.imwrite(str(root / split / name), noise(HEIGHT, WIDTH, 3))
                lines.append(f'{name} {label}\n')
        (root / f'meta/{split}.txt').write_text(''.join(lines))


def write_voc(root: Path, label: str = 'RBC') -> Path:
    """Write six micrographs in the layout of BCCD's repository, two of them for testing."""
    names = [f'BloodImage_{number:05}' for number in range(6)]
    for folder in ('Annotations', 'ImageSets/Main', 'JPEGImages'):
        (root / folder).mkdir(parents=True)
    (root / 'ImageSets/Main/trainval.txt').write_text('\n'.join(names[:4]))
    (root / 'ImageSets/Main/test.txt').write_text('\n'.join(names[4:]))
    boxes = BOX.format('WBC', 30, 20, 90, 70) + BOX.format(label, 100, 60, 140, 100) + BOX.format('RBC', 5, 5, 5, 30)
    size = '<size><width>160</width><height>120</height></size>'
    rng = np.random.default_rng(0)
    for name in names:
        (root / f'Annotations/{name}.xml').write_text(f'<annotation>{size}{boxes}</annotation>')
        cv2.imwrite(str(root / f'JPEGImages/{name}.jpg'), rng.integers(0, 255, (120, 160, 3), np.uint8))
    return root


def write_segnet(root: Path, highest: int = 11) -> Path:
    """Write images of CamVid's names in the layout of its repository, with labels up to ``highest``."""
    names = dict(train=(*DAY, *DUSK), val=('0016E5_07959',), test=('0001TP_008550', 'Seq05VD_f00000'))
    rng = np.random.default_rng(0)
    for split, of_split in names.items():
        for folder in (split, f'{split}annot'):
            (root / folder).mkdir(parents=True)
        for name in of_split:
            label = np.repeat(np.arange(12, dtype=np.uint8), 4)[None].repeat(36, 0)
            label[label == 11] = highest
            cv2.imwrite(str(root / f'{split}annot/{name}.png'), label)
            cv2.imwrite(str(root / f'{split}/{name}.png'), rng.integers(0, 255, (36, 48, 3), np.uint8))
    return root


def write_facemask(root: Path) -> None:
    """Write face masks' layout, which is COCO's, with BCCD's boxes."""
    written = root.with_name('bccd-of-facemask')
    bccd.convert(write_voc(root.with_name('voc-of-facemask')), written)
    for split, folder in (('train', 'train2017'), ('val', 'val2017')):
        content = json.loads((written / f'annotations/{split}.json').read_text())
        names = ('mask_weared_incorrect', 'with_mask', 'without_mask')
        content['categories'] = [dict(id=number, name=name) for number, name in enumerate(names)]
        (root / 'annotations').mkdir(parents=True, exist_ok=True)
        (root / f'annotations/custom_{split}.json').write_text(json.dumps(content))
        (root / folder).mkdir()
        for image in content['images']:
            (root / folder / image['file_name']).write_bytes((written / 'images' / image['file_name']).read_bytes())
