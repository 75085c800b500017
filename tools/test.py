"""Evaluate a checkpoint of a detector or a segmentor: ``python tools/test.py CONFIG CHECKPOINT --help``."""

import sys

from mmgate.mm import cli

if __name__ == '__main__':
    sys.exit(cli.main(cli.test))
