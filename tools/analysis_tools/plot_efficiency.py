"""Draw throughput and peak memory of configs' backbones over the image size, and accuracies against throughput.

SAGA, Fig. 4; Agent attention, Fig. 4.

Example: plot_efficiency.py VANILLA_CONFIG SAGA_CONFIG --sizes 224 512 1280 --out out
"""

import argparse
import sys
from functools import partial
from pathlib import Path

from mmgate.analysis.arguments import plain_parser, run
from mmgate.mm.gate_options import add_gate_option

MODES = ('forward', 'forward+backward')
OPTIONS = ('batch', 'repetitions', 'modes', 'device', 'autocast', 'launches')  # of benchmark_models


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = plain_parser(__doc__)
    parser.add_argument('configs', nargs='+', help="config files, or 'package::path'; the first is the peer")
    add_gate_option(parser)
    parser.add_argument('--sizes', type=int, nargs='+', default=[224, 512, 800, 1280], help='sides of square images')
    parser.add_argument('--batch', type=int, default=1, help='images at a time (default %(default)s)')
    parser.add_argument('--modes', nargs='+', choices=MODES, default=MODES[:1], help='each a panel (default: forward)')
    parser.add_argument('--repetitions', type=int, default=3, help='the median of which is drawn (default %(default)s)')
    parser.add_argument('--device', default='cpu', help='cpu (default) or cuda')
    parser.add_argument('--autocast', action='store_true', help='bfloat16 where autocast takes it')
    parser.add_argument('--launches', action='store_true', help="count a GPU's launches, too: throughput as it is seen")
    found = "CSV of each config's accuracy, columns config (its file's name), accuracy and, to join points, family"
    parser.add_argument('--accuracies', type=Path, help=f'{found}; drawn at the first of --sizes')
    parser.add_argument('--out', required=True, help='folder for picture and CSV')
    return parser


def main(argv: list[str]) -> None:
    """Parse arguments, measure, draw, write the table."""
    args = parser().parse_args(argv)
    from mmengine.logging import MMLogger

    from mmgate.benchmarks import backbones
    from mmgate.benchmarks.measure import throughput, told, write_csv
    from mmgate.errors import ConfigError
    from mmgate.mm.config_file import read_config
    from mmgate.mm.gate_options import put_rules

    if min(args.batch, args.repetitions) < 1 or min(args.sizes) < 32:
        raise ConfigError('--batch and --repetitions take 1 or more, --sizes sides of 32 pixels or more.')
    MMLogger.get_current_instance().setLevel('ERROR')
    builds = {Path(path).stem: partial(backbones.backbone, read_config(path)) for path in args.configs}
    if len(builds) < len(args.configs):
        raise ConfigError('two configs have one file name, by which they are told apart; copy one to another name.')
    for path in args.configs if args.gate else ():
        cfg = read_config(path)
        put_rules(cfg, args.gate)
        builds[f'{Path(path).stem}, gated'] = partial(backbones.backbone, cfg)
    accuracies = backbones.read_accuracies(args.accuracies, builds) if args.accuracies else None
    options = {name: getattr(args, name) for name in OPTIONS}
    measured = backbones.benchmark_models(builds, args.sizes, **options)
    shown = (throughput(row, args.batch) if row.metric == 'time' else row for row in measured)
    out = Path(args.out) / 'efficiency.csv'
    print(backbones.draw_curves(write_csv(told(shown), out), out.with_suffix('.png'), accuracies), out)


if __name__ == '__main__':
    sys.exit(run(parser, main))
