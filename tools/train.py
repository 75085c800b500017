"""Train a detector or a segmentor from a config: ``python tools/train.py CONFIG --help``."""

import sys

from mmgate.mm import cli

if __name__ == '__main__':
    sys.exit(cli.main(cli.train))
