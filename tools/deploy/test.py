"""Evaluate an exported file on the config's test data: ``python tools/deploy/test.py CONFIG FILE --help``."""

import sys

import mmgate  # noqa: F401
from mmgate.deploy.commands import test
from mmgate.train import cli

if __name__ == '__main__':
    sys.exit(cli.main(test))
