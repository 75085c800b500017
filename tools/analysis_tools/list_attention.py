"""Print every attention module of a config's model: path, class, sizes, and the gates that fit it or that it has."""

import argparse
import logging
import sys

from mmgate.analysis.report.structure import build_structure, list_attention
from mmgate.train import cli
from mmgate.train.config_file import read_config


def main(argv: list[str]) -> None:
    """Parse arguments and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('config', help="config file, or 'package::path'")
    args = parser.parse_args(argv)
    logging.getLogger('mmengine').setLevel(logging.WARNING)
    cfg = read_config(args.config)
    rows = [('path', 'class', 'sizes', 'gates that fit')]
    for attention in list_attention(build_structure(cfg)):
        sizes = ', '.join(f'{name}={size}' for name, size in attention.sizes.items())
        fitting = ', '.join(attention.gates) or '-'
        gates = f'gated by {attention.gate}' if attention.gate else fitting
        rows.append((attention.path, attention.kind, sizes, gates))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print('  '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


if __name__ == '__main__':
    sys.exit(cli.main(main))
