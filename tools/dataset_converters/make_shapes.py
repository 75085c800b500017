"""Write the generated shapes data set, as a COCO folder and as an ADE20K folder over the same images.

ROOT/imagenet holds images of one object each, in a folder for each class.
"""

import argparse
from pathlib import Path

from drawing import CLASSES
from image_folders import write_shapes_folder
from shapes import DIFFICULTIES, write_shapes


def main() -> None:
    """Parse arguments and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('root', nargs='?', default='data/shapes', help='folder to write (default: %(default)s)')
    parser.add_argument('--num-train', type=int, default=400, help='training images (default: %(default)s)')
    parser.add_argument('--num-val', type=int, default=80, help='validation images (default: %(default)s)')
    parser.add_argument('--size', type=int, default=128, help='side of an image in pixels (default: %(default)s)')
    parser.add_argument('--seed', type=int, default=0, help='seed (default: %(default)s)')
    parser.add_argument(
        '--difficulty',
        choices=list(DIFFICULTIES),
        default='plain',
        help="hard: more and smaller objects, hidden parts, clutter in the objects' own colours (default: %(default)s)",
    )
    parser.add_argument('--force', action='store_true', help='replace shapes written with other arguments')
    parser.add_argument(
        '--num-objects',
        type=int,
        default=1200,
        help='training images of the ImageNet folder; a fifth for validation; 0 for no folder (default: %(default)s)',
    )
    args = parser.parse_args()
    objects = vars(args).pop('num_objects')
    fewest = 5 * len(CLASSES)  # for an image of every class in the fifth for validation
    if objects and objects < fewest:
        parser.exit(2, f'error: --num-objects must be 0, or {fewest} or more; got {objects}.\n')
    try:
        written = write_shapes(**vars(args))
        if objects:
            same = dict(seed=args.seed, force=args.force)
            written |= write_shapes_folder(Path(args.root, 'imagenet'), num_train=objects, num_val=objects // 5, **same)
    except (ValueError, FileExistsError) as error:
        parser.exit(2, f'error: {error}\n')
    counts = f'{args.num_train} training and {args.num_val} validation images of {args.size} px'
    print(f'{args.root}: {counts} {"written" if written else "were there already"}')


if __name__ == '__main__':
    main()
