"""Train a detector or a segmentor from a config: ``python tools/train.py CONFIG --help``."""

import sys

from mmgate.tools.train import main

if __name__ == '__main__':
    sys.exit(main())
