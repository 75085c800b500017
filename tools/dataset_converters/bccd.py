"""Convert the VOC files of github.com/Shenggan/BCCD_Dataset to COCO's layout: images, annotations/{train,val}.json."""

import argparse
import json
import shutil
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from mmgate.analysis.arguments import run
from mmgate.errors import ConfigError

CLASSES = ('Platelets', 'RBC', 'WBC')
SPLITS = {'train': 'trainval', 'val': 'test'}  # ours, theirs


def convert(source: Path, out: Path) -> dict[str, int]:
    """Write images and annotations, and return the number of boxes of each split.

    Boxes thinner than a pixel are left out.

    Args:
        source: Folder ``BCCD`` of the repository.
        out: Folder to write.

    Raises:
        ConfigError: A file is missing, or a box has an unknown class.
    """
    lists = {split: source / 'ImageSets/Main' / f'{theirs}.txt' for split, theirs in SPLITS.items()}
    for path in lists.values():
        if not path.is_file():
            raise ConfigError(
                f'there is no {path}. Give the folder BCCD of a copy of github.com/Shenggan/BCCD_Dataset.'
            )
    (out / 'images').mkdir(parents=True, exist_ok=True)
    (out / 'annotations').mkdir(exist_ok=True)
    counts = {}
    for split, path in lists.items():
        content = read_split(source, sorted(path.read_text().split()))
        for image in content['images']:
            shutil.copyfile(source / 'JPEGImages' / image['file_name'], out / 'images' / image['file_name'])
        (out / f'annotations/{split}.json').write_text(json.dumps(content))
        counts[split] = len(content['annotations'])
    return counts


def read_split(source: Path, names: list[str]) -> dict[str, list[dict[str, Any]]]:
    """Return COCO's content for the images with these names, without the ending of their files.

    Raises:
        ConfigError: A box has an unknown class.
    """
    images = []
    boxes: list[dict[str, Any]] = []
    for number, name in enumerate(names):
        root = ElementTree.parse(source / 'Annotations' / f'{name}.xml').getroot()
        size = {side: int(root.findtext(f'size/{side}', '0')) for side in ('width', 'height')}
        images.append(dict(id=number, file_name=f'{name}.jpg', **size))
        for found in root.iter('object'):
            label = found.findtext('name', '')
            if label not in CLASSES:
                raise ConfigError(f'{name}.xml has a box of class {label!r}; known are {", ".join(CLASSES)}.')
            left, top, right, bottom = (
                float(found.findtext(f'bndbox/{k}', '0')) for k in ('xmin', 'ymin', 'xmax', 'ymax')
            )
            width = right - left
            height = bottom - top
            if min(width, height) < 1:
                continue
            box = dict(id=len(boxes), image_id=number, category_id=CLASSES.index(label), iscrowd=0)
            boxes.append(dict(box, bbox=[left, top, width, height], area=width * height))
    categories = [dict(id=number, name=name) for number, name in enumerate(CLASSES)]
    return dict(images=images, annotations=boxes, categories=categories)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('source', type=Path, help='folder BCCD of the repository')
    parser.add_argument('out', type=Path, nargs='?', default=Path('data/bccd'), help='default: data/bccd')
    return parser


def main(argv: list[str]) -> None:
    """Parse arguments, convert, print the counts."""
    args = parser().parse_args(argv)
    counts = convert(args.source, args.out)
    print(f'{args.out}: {", ".join(f"{count} boxes of {split}" for split, count in counts.items())}')


if __name__ == '__main__':
    sys.exit(run(parser, main))
