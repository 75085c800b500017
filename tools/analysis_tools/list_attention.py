"""Print every attention module of a config's model: path, class, sizes, the gates that fit it or that it has.

Each line ends with a --gate that gates this module and those alike; another type of the line may be written instead.
With --measure it runs a trained model over images and sorts the lines by what it finds.
"""

import argparse
import logging
import shlex
import sys
from collections.abc import Mapping, Sequence

from mmengine.logging import MMLogger

from mmgate.analysis.loading import add_images, load_model
from mmgate.analysis.probes.sensitivity import measure_attention, sensitivity
from mmgate.analysis.structure import Attention, build_structure, list_attention, rules_to_paste
from mmgate.errors import ConfigError
from mmgate.train import cli
from mmgate.train.config_file import add_trust_option, config_parser
from mmgate.train.gate_options import add_gate_options, configured

FIGURES = {
    'at_0.9': 'logits x 0.9',
    'at_1.1': 'logits x 1.1',
    'entropy': 'entropy',
    'sink': 'most attended',
    'uniform': 'uniform',
    'rank': 'rank of K^T V',
}
HOW_TO_READ = (
    'The further up, the more the output of an attention moves, as a share of its size, when its logits are scaled, '
    'which is what gates on logits do; entropy and rank are shares of the largest possible, and none of these figures '
    'tells whether a gate helps.'
)


def main(argv: list[str]) -> None:
    """Parse arguments and print a table."""
    parser = config_parser(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_gate_options(parser)
    parser.add_argument('--measure', metavar='CHECKPOINT', help="checkpoint of the model, or 'untrained'")
    add_images(parser, split='val', count=4)
    parser.add_argument('--device', default='cpu', help='cpu (default) or cuda')
    add_trust_option(parser)
    args = parser.parse_args(argv)
    MMLogger.get_current_instance().setLevel(logging.WARNING)
    cfg = configured(args)
    model = build_structure(cfg)
    listed = list_attention(model)
    texts = rules_to_paste(model, listed)
    if args.measure is None:
        print_columns([('path', 'class', 'sizes', 'gates that fit', 'to paste'), *(_row(row, texts) for row in listed)])
        return
    loaded = load_model(cfg, args.measure, args.device)
    measured = measure_attention(loaded.model, loaded.inputs(args))
    if not measured:
        raise ConfigError(f'{type(loaded.model).__name__} has no attention that can be measured.')
    print()
    print_columns(measured_rows(listed, texts, measured))
    print(f'\n{HOW_TO_READ}')


def _row(attention: Attention, texts: Mapping[str, str]) -> tuple[str, ...]:
    sizes = ', '.join(f'{name}={size}' for name, size in attention.sizes.items())
    return (attention.path, attention.class_name, sizes, _gates(attention), _pasted(attention, texts))


def _gates(attention: Attention) -> str:
    return f'gated by {attention.gate}' if attention.gate else ', '.join(attention.gates) or '-'


def _pasted(attention: Attention, texts: Mapping[str, str]) -> str:
    text = texts.get(attention.path)
    return f'--gate {shlex.quote(text)}' if text else ''


def measured_rows(
    listed: Sequence[Attention], texts: Mapping[str, str], measured: Mapping[str, Mapping[str, float]]
) -> list[tuple[str, ...]]:
    """Return rows of a table, the attention that moves most first, with a line for the one that is to be gated.

    Args:
        listed: The model's attention.
        texts: Rules to paste, by path.
        measured: Figures by path, see :func:`mmgate.analysis.probes.sensitivity.measure_attention`.
    """
    by_path = {attention.path: attention for attention in listed}
    rows = [('path', 'class', *FIGURES.values(), 'to paste')]
    for path, figures in sorted(measured.items(), key=lambda item: -sensitivity(dict(item[1]))):
        # Torch's module in one of mmcv's is measured, and the latter is named.
        names = path.split('.')
        listed_as = ('.'.join(names[:count]) for count in range(len(names), 0, -1))
        around = next((by_path[name] for name in listed_as if name in by_path), None)
        cells = ['-' if figures[name] != figures[name] else f'{figures[name]:.3f}' for name in FIGURES]
        shown = around or Attention(path, '', {}, ())
        rows.append((shown.path, shown.class_name, *cells, _pasted(shown, texts)))
    return rows


def print_columns(rows: Sequence[Sequence[str]]) -> None:
    """Print rows of cells in columns as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print('  '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


if __name__ == '__main__':
    sys.exit(cli.main(main))
