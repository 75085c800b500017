"""Evaluate a checkpoint of a detector or a segmentor: ``python tools/test.py CONFIG CHECKPOINT --help``."""

import sys

from mmgate.tools.test import main

if __name__ == '__main__':
    sys.exit(main())
