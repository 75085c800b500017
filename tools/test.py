"""Evaluate a checkpoint of a detector or a segmentor: ``python tools/test.py CONFIG CHECKPOINT --help``."""

import sys
from pathlib import Path

from mmgate.mm import cli

if __name__ == '__main__':
    # Configs import projects, which are beside this folder and which no installation has. What is installed goes first.
    sys.path.append(str(Path(__file__).resolve().parents[1]))
    sys.exit(cli.main(cli.test))
