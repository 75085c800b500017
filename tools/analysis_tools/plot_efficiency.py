"""Draw throughput and peak memory of configs' backbones over the image size, and accuracies against throughput.

SAGA, Fig. 4; Agent attention, Fig. 4.

Example: plot_efficiency.py VANILLA_CONFIG SAGA_CONFIG --sizes 224 512 1280 --out out
"""

import argparse
import csv
import sys
from collections.abc import Iterable
from copy import deepcopy
from functools import partial
from pathlib import Path

from mmengine.config import Config
from mmengine.logging import MMLogger
from mmengine.registry import MODELS, init_default_scope
from torch import nn

import mmgate  # noqa: F401
from mmgate.benchmarks.backbones import Accuracy, benchmark_models, draw_curves
from mmgate.benchmarks.measure import MODES, throughput, told, write_csv
from mmgate.errors import ConfigError
from mmgate.mm import cli
from mmgate.mm.config_file import package_of, read_config
from mmgate.mm.gate_options import add_gate_option, put_gates

OPTIONS = ('batch', 'repetitions', 'modes', 'device', 'autocast', 'launches')  # of benchmark_models


def main(argv: list[str]) -> None:
    """Parse arguments, measure, draw, write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    args = parser.parse_args(argv)
    if min(args.batch, args.repetitions) < 1 or min(args.sizes) < 32:
        raise ConfigError('--batch and --repetitions take 1 or more, --sizes sides of 32 pixels or more.')
    MMLogger.get_current_instance().setLevel('ERROR')
    builds = {Path(path).stem: partial(backbone, read_config(path)) for path in args.configs}
    if len(builds) < len(args.configs):
        raise ConfigError('two configs have one file name, by which they are told apart; copy one to another name.')
    for path in args.configs if args.gate else ():
        cfg = read_config(path)
        put_gates(cfg, args.gate)
        builds[f'{Path(path).stem}, gated'] = partial(backbone, cfg)
    accuracies = read_accuracies(args.accuracies, builds) if args.accuracies else None
    options = {name: getattr(args, name) for name in OPTIONS}
    measured = benchmark_models(builds, args.sizes, **options)
    shown = (throughput(row, args.batch) if row.metric == 'time' else row for row in measured)
    out = Path(args.out) / 'efficiency.csv'
    print(draw_curves(write_csv(told(shown), out), out.with_suffix('.png'), accuracies), out)


def read_accuracies(path: Path, names: Iterable[str]) -> dict[str, Accuracy]:
    """Return the accuracies in a CSV file, by the names of the configs.

    Raises:
        ConfigError: The file cannot be read, lacks a column or one of the ``names``, or has a value that is no number.
    """
    try:
        with path.open(newline='') as file:
            rows = list(csv.DictReader(file))
        found = {Path(row['config']).name.removesuffix('.py'): row for row in rows}
        accuracies = {name: (float(row['accuracy']), row.get('family') or '') for name, row in found.items()}
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f'{path} is no CSV file with columns config and accuracy, a number: {error!r}.') from error
    missing = [name for name in names if name not in accuracies]
    if missing:
        raise ConfigError(f'{path} has no accuracy of {", ".join(missing)}; add a row for each.')
    return accuracies


def backbone(cfg: Config) -> nn.Module:
    """Return a config's backbone with the gates of its rules, without downloading weights."""
    init_default_scope(package_of(cfg) or 'mmdet')
    model = deepcopy(cfg.model)
    if model.get('backbone') is None:
        raise ConfigError(f'{cfg.filename} has no model.backbone.')
    model.backbone.init_cfg = None
    built: nn.Module = MODELS.build(model) if 'attention' in model else MODELS.build(model.backbone)
    built = getattr(built, 'backbone', built)
    built.init_weights()
    return built


if __name__ == '__main__':
    sys.exit(cli.main(main))
