"""Print every attention module of a config's model: path, class, sizes, and which gates fit it."""

import argparse
import logging
import sys

import torch
from mmengine.registry import MODELS, init_default_scope

import mmgate  # noqa: F401
from mmgate.engine import cli
from mmgate.models import attention_modules
from mmgate.models.adapters import gates_for

SIZES = ('embed_dims', 'embed_dim', 'num_heads', 'num_levels', 'num_points', 'window_size', 'sr_ratio')


def main(argv: list[str]) -> None:
    """Parse arguments and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('config', help="config file, or 'package::path'")
    logging.getLogger('mmengine').setLevel(logging.WARNING)
    cfg = cli.read_config(parser.parse_args(argv).config)
    init_default_scope(cfg.get('default_scope') or 'mmengine')
    with torch.device('meta'):  # names and sizes need no memory
        model = MODELS.build(cfg.model)
    rows = [('path', 'class', 'sizes', 'gates that fit')]
    for name, module in attention_modules(model):
        sizes = ', '.join(f'{size}={getattr(module, size)}' for size in SIZES if hasattr(module, size))
        gates = ', '.join(gate.__name__ for gate in gates_for(module))
        rows.append((name, type(module).__name__, sizes, gates or '-'))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print('  '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


if __name__ == '__main__':
    sys.exit(cli.main(main))
