"""Evaluate a checkpoint of a detector or a segmentor: ``python -m mmgate.tools.test CONFIG CHECKPOINT --help``."""

import sys

from mmgate.mm import cli


def main() -> int:
    """Run the command line of ``python -m mmgate.tools.test`` and return its exit status."""
    return cli.main(cli.test)


if __name__ == '__main__':
    sys.exit(main())
