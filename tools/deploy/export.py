"""Write a detector or a segmentor as a file that runs without it: ``python tools/deploy/export.py --help``."""

import sys

import mmgate  # noqa: F401
from mmgate.deploy.commands import export
from mmgate.train import cli

if __name__ == '__main__':
    sys.exit(cli.main(export))
