"""Compare runs: a metric over time, final values with mean, spread and a paired test over seeds, time and memory.

Example: compare_runs.py vanilla=work_dirs/v0,work_dirs/v1 plug=work_dirs/p0,work_dirs/p1 --out out
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from mmgate.analysis.arguments import plain_parser, run


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = plain_parser(__doc__)
    parser.add_argument('runs', nargs='+', help='WORK_DIR, or NAME=WORK_DIR,WORK_DIR,... for seeds in one order')
    parser.add_argument('--metric', help='default: box AP, mask AP, mIoU or accuracy, the first that all have')
    parser.add_argument('--out', required=True, help='folder for picture and CSV')
    return parser


def main(argv: list[str]) -> None:
    """Parse arguments, read the logs, draw, print the table."""
    args = parser().parse_args(argv)
    import numpy as np

    from mmgate.analysis.loading import write_csv
    from mmgate.analysis.trials import compare
    from mmgate.errors import ConfigError

    groups: dict[str, list[compare.Run]] = {}
    for given in args.runs:
        name, _, listed = ('', '', given) if Path(given).is_dir() or '=' not in given else given.partition('=')
        folders = listed.split(',')
        name = name or Path(folders[0]).name
        if name in groups:
            raise ConfigError(f'two groups are called {name}; give them names: NAME=WORK_DIR.')
        if len({Path(folder).resolve() for folder in folders}) < len(folders):
            raise ConfigError(f'{name}: a work dir is given twice; a run counts once.')
        groups[name] = [compare.read_run(folder) for folder in folders]
    metric = compare.choose_metric([run for runs in groups.values() for run in runs], args.metric)
    rows = compare.summary({name: [run.final(metric) for run in runs] for name, runs in groups.items()})
    costs = []
    for row, runs in zip(rows, groups.values(), strict=True):
        row.update(compare.gates_of(runs))
        costs.append([float(np.mean([getattr(run, key) for run in runs])) for key in ('seconds', 'memory')])
    out = compare.draw_curves(groups, metric, Path(args.out) / 'runs.png')
    # Only runs with gates have the distances of gates.
    columns: dict[str, Any] = dict.fromkeys([key for row in rows for key in row], '')
    named = [dict(seconds_per_step=seconds, memory_mb=memory) for seconds, memory in costs]
    write_csv(out.with_suffix('.csv'), [{**columns, **row, **cost} for row, cost in zip(rows, named, strict=True)])
    print(f'{metric}\n{compare.as_table(rows)}')
    for problem in compare.unpaired(groups):
        print(f'warning: {problem}', file=sys.stderr)
    for name, (seconds, memory) in zip(groups, costs, strict=True):
        print(f'{name}: {seconds:.3f} s a step{"" if np.isnan(memory) else f", {memory:.0f} MB of GPU"}')
    print(out, out.with_suffix('.csv'))


if __name__ == '__main__':
    sys.exit(run(parser, main))
