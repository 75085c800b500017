"""Print every attention module of a config's model: path, class, sizes, the gates that fit it or that it has.

Each line ends with a --gate that gates this module and those alike; another type of the line may be written instead.
"""

import logging
import shlex
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from mmgate.analysis.arguments import gated_parser, run

parser = partial(gated_parser, __doc__)


def main(argv: list[str]) -> None:
    """Parse arguments and print a table."""
    args = parser().parse_args(argv)
    from mmengine.logging import MMLogger

    from mmgate.analysis.structure import build_structure, list_attention, rules_to_paste
    from mmgate.gated import image_size_of
    from mmgate.gates.base.map import IMAGE_SIDE
    from mmgate.mm.gate_options import configured

    MMLogger.get_current_instance().setLevel(logging.WARNING)
    cfg = configured(args)
    model = build_structure(cfg)
    listed = list_attention(model)
    texts = rules_to_paste(model, listed, image_size_of(cfg.model) or IMAGE_SIDE)
    print_columns([('path', 'class', 'sizes', 'gates that fit', 'to paste'), *(_row(row, texts) for row in listed)])


def _row(attention: Any, texts: Mapping[str, str]) -> tuple[str, ...]:
    sizes = ', '.join(f'{name}={size}' for name, size in attention.sizes.items())
    gates = f'gated by {attention.gate}' if attention.gate else ', '.join(attention.gates) or '-'
    text = texts.get(attention.path)
    pasted = f'--gate {shlex.quote(text)}' if text else ''
    return (attention.path, attention.class_name, sizes, gates, pasted)


def print_columns(rows: Sequence[Sequence[str]]) -> None:
    """Print rows of cells in columns as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print('  '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


if __name__ == '__main__':
    sys.exit(run(parser, main))
