"""Command lines of these tools, parsed before torch is imported, so that --help and mistakes cost no time."""

import argparse
import os
from collections.abc import Callable
from typing import Any

RULE = "'PATH=TYPE(option=value, ...)'"
TRAINS = ('gates', 'attention', 'all')


def run(parser: Callable[[], argparse.ArgumentParser], main: Callable[[list[str]], None]) -> int:
    """Run a tool as a program, and return its exit status; its ``main`` parses by the same parser."""
    parser().parse_args()
    from mmgate.mm import cli

    return cli.main(main)


def plain(description: str | None) -> argparse.ArgumentParser:
    """Return a parser without arguments, whose help has the lines of a tool's docstring."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def of_config(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with a config and changes of it."""
    parser = plain(description)
    parser.add_argument('config', help="config file, or 'package::path' of an installed package's config")
    changed = 'override settings: key=value, nested keys by dots, lists as key="[a,b]"'
    parser.add_argument('--cfg-options', nargs='+', action=_CfgOptions, help=changed)
    return parser


def add_gate(parser: argparse.ArgumentParser, **options: Any) -> None:
    """Add the option ``--gate``."""
    shown = 'gate the modules at PATH of the model of CONFIG; may be given again. list_attention.py prints paths, types'
    parser.add_argument('--gate', action='append', metavar=RULE, **{'default': [], 'help': shown, **options})


def of_gated_config(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with a config, changes of it, and gates to put on its model."""
    parser = of_config(description)
    add_gate(parser)
    shown = 'put the gates of a gates file on the model of CONFIG, instead of --gate'
    parser.add_argument('--gates', metavar='FILE', help=shown)
    shown = "what of a gated model trains: its gates, the gated modules, or all (CONFIG's)"
    parser.add_argument('--train', choices=TRAINS, help=shown)
    return parser


def of_drawing(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that all drawing tools share; a tool adds more to it."""
    parser = of_gated_config(description)
    shown = "checkpoint file or URL; 'untrained' for the model as it is initialised"
    parser.add_argument('checkpoint', help=shown)
    where = parser.add_mutually_exclusive_group()
    where.add_argument('--images', nargs='+', help='image files, folders of some, or patterns')
    splits = ['train', 'val', 'test']
    where.add_argument('--split', default='val', choices=splits, help='images of the data set (default %(default)s)')
    parser.add_argument('--max-images', type=positive, default=8, help='of the split (default %(default)s)')
    add_trust(parser)
    shown = 'another model, drawn beside, as often as there are models; --cfg-options are of its config, too, '
    shown += 'and --gate is of CONFIG alone'
    pair = ('CONFIG', 'CHECKPOINT')
    parser.add_argument('--against', nargs=2, metavar=pair, action='append', default=[], help=shown)
    parser.add_argument('--device', default='cpu', help='cpu (default) or cuda')
    parser.add_argument('--out', required=True, help='folder for pictures and CSV files')
    return parser


def add_processes(parser: argparse.ArgumentParser) -> None:
    """Add the options ``--launcher`` and ``--processes``."""
    parser.add_argument('--launcher', choices=['none', 'pytorch'], default='none', help='pytorch: several processes')
    parser.add_argument('--processes', type=positive, help='of --launcher pytorch, on a GPU each (default 2)')


def add_trust(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--trust-checkpoint``; it holds for this process and those that it starts."""
    shown = 'load a checkpoint as pickle does, code and all: only one whose maker you trust'
    parser.add_argument('--trust-checkpoint', action=_Trust, nargs=0, help=shown)


def positive(text: str) -> int:
    """Convert the text of an option to an int, and refuse it if it is below 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f'{text}: give 1 or more.')
    return number


class _Trust(argparse.Action):
    def __call__(self, *_: object) -> None:
        os.environ['MMGATE_TRUST_CHECKPOINT'] = '1'


class _CfgOptions(argparse.Action):
    """mmengine's DictAction, imported when it is needed."""

    def __call__(self, *given: Any) -> None:
        from mmengine.config import DictAction

        DictAction(self.option_strings, self.dest, nargs=self.nargs)(*given)
