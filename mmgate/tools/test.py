"""Evaluate a checkpoint of a detector or a segmentor: ``python -m mmgate.tools.test CONFIG CHECKPOINT --help``."""

import sys

from mmgate.train import cli


def main() -> int:
    """Run the command line and return its exit status."""
    return cli.main(cli.test)


if __name__ == '__main__':
    sys.exit(main())
