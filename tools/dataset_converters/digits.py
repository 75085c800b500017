"""Write scikit-learn's handwritten digits (1,797 real images, shipped inside the package) in ImageNet's layout."""

import argparse

from image_folders import write_digits


def main() -> None:
    """Parse arguments and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('root', nargs='?', default='data/digits', help='folder to write (default: %(default)s)')
    parser.add_argument('--size', type=int, default=32, help='side of an image in pixels (default: %(default)s)')
    parser.add_argument('--seed', type=int, default=0, help='of the split (default: %(default)s)')
    parser.add_argument('--force', action='store_true', help='replace digits written with other arguments')
    args = parser.parse_args()
    try:
        written = write_digits(**vars(args))
    except (ImportError, ValueError, FileExistsError) as error:
        parser.exit(2, f'error: {error}\n')
    print(f'{args.root}: 1797 digits of {args.size} px {"written" if written else "were there already"}')


if __name__ == '__main__':
    main()
