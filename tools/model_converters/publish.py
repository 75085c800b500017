"""Publish a checkpoint: its weights alone, without optimizer states, as NAME-HASH.pth or NAME-HASH.safetensors.

The config, the classes and the palette stay in it, so that tools/test.py, init_cfg and the inferencers take the file. A
config may hold names of your folders. No code of the checkpoint runs.
"""

import argparse
import sys

from mmgate.engine import cli
from mmgate.engine.publish import FORMATS, WEIGHTS, publish
from mmgate.engine.safe_load import add_trust_option


def run(argv: list[str]) -> None:
    """Parse arguments and publish."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('checkpoint', help='file or URL')
    parser.add_argument('out', nargs='?', help='file, to whose name the hash is added, or folder (default: beside it)')
    parser.add_argument('--format', choices=FORMATS, help='default: what OUT ends with, or else pth')
    parser.add_argument(
        '--weights', choices=WEIGHTS, help='of a run with an EMAHook: its averages (the default), or what it averaged'
    )
    add_trust_option(parser)
    args = parser.parse_args(argv)
    path = publish(args.checkpoint, args.out, form=args.format, weights=args.weights)
    print(f'{path}: {path.stat().st_size / 1e6:.1f} MB')


if __name__ == '__main__':
    sys.exit(cli.main(run))
