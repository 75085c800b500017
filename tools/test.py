"""Evaluate a checkpoint of a detector or a segmentor: ``python tools/test.py CONFIG CHECKPOINT --help``."""

import sys

import mmgate  # noqa: F401  (registers the components and 'mmgate::' configs)
from mmgate.engine import cli

if __name__ == '__main__':
    sys.exit(cli.main(cli.test))
