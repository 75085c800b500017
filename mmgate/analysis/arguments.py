"""Arguments that command lines of several tools share; they are parsed before torch is imported."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from mmgate.mm import cli
from mmgate.mm.config_file import add_trust_option, config_parser
from mmgate.mm.gate_options import add_gate_options

UNTRAINED = 'untrained'


def run(parser: Callable[[], argparse.ArgumentParser], main: Callable[[list[str]], None]) -> int:
    """Run a tool and return its exit status; ``--help`` and mistakes in its arguments do not wait for torch.

    Args:
        parser: Function that returns the parser by which ``main`` parses.
        main: The tool.
    """
    parser().parse_args()
    return cli.main(main)


def plain_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser without arguments, whose help has the lines of the description."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def gated_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser of a config, of changes to it, and of gates to put on its model."""
    parser = config_parser(description)
    add_gate_options(parser)
    return parser


def drawing_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that all drawing tools share; a tool adds more to it."""
    parser = gated_parser(description)
    add_inputs(parser)
    beside = 'another model, drawn beside, as often as there are models; --cfg-options are of its config, too, '
    beside += 'and --gate is of CONFIG alone'
    pair: Any = dict(nargs=2, metavar=('CONFIG', 'CHECKPOINT'), action='append', default=[])
    parser.add_argument('--against', help=beside, **pair)
    parser.add_argument('--device', default='cpu', help='cpu (default) or cuda')
    parser.add_argument('--out', required=True, help='folder for pictures and CSV files')
    return parser


def add_inputs(parser: argparse.ArgumentParser, *, split: str = 'val', count: int = 8) -> None:
    """Add arguments for a checkpoint and images to a parser; the default is the first ``count`` images of ``split``."""
    parser.add_argument('checkpoint', help=f"checkpoint file or URL; '{UNTRAINED}' for the model as it is initialised")
    where = parser.add_mutually_exclusive_group()
    where.add_argument('--images', nargs='+', help='image files, folders of some, or patterns')
    splits = ['train', 'val', 'test']
    where.add_argument('--split', default=split, choices=splits, help='images of the data set (default %(default)s)')
    parser.add_argument('--max-images', type=positive, default=count, help='of the split (default %(default)s)')
    add_trust_option(parser)


def add_processes(parser: argparse.ArgumentParser) -> None:
    """Add the options ``--launcher`` and ``--processes``."""
    parser.add_argument('--launcher', choices=['none', 'pytorch'], default='none', help='pytorch: several processes')
    parser.add_argument('--processes', type=positive, help='of --launcher pytorch, on a GPU each (default 2)')


def positive(text: str) -> int:
    """Convert the text of a command-line option to an int, and refuse it if it is below 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f'{text}: give 1 or more.')
    return number
