"""Train a detector or a segmentor from a config: ``python tools/train.py CONFIG --help``."""

import sys

import mmgate  # noqa: F401  (registers the components and 'mmgate::' configs)
from mmgate.engine import cli

if __name__ == '__main__':
    sys.exit(cli.main(cli.train))
