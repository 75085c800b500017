"""Train a detector or a segmentor from a config: ``python -m mmgate.tools.train CONFIG --help``."""

import sys

from mmgate.mm import cli


def main() -> int:
    """Run the command line of ``python -m mmgate.tools.train`` and return its exit status."""
    return cli.main(cli.train)


if __name__ == '__main__':
    sys.exit(main())
