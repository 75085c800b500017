"""Compare runs: a metric over time, final values with mean, spread and a paired test over seeds, time and memory.

Example: compare_runs.py vanilla=work_dirs/v0,work_dirs/v1 plug=work_dirs/p0,work_dirs/p1 --out out
"""

import argparse
import sys
from pathlib import Path

import numpy as np

import mmgate  # noqa: F401
from mmgate.analysis.runs import Run, as_table, choose_metric, draw_curves_of_runs, read_run, summary
from mmgate.analysis.subjects import write_csv
from mmgate.engine import cli
from mmgate.engine.preflight import ConfigError


def main(argv: list[str]) -> None:
    """Parse arguments, read the logs, draw, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('runs', nargs='+', help='WORK_DIR, or NAME=WORK_DIR,WORK_DIR,... for seeds in one order')
    parser.add_argument('--metric', help='default: box AP, mask AP, mIoU or accuracy, the first that all have')
    parser.add_argument('--out', required=True, help='folder for picture and CSV')
    args = parser.parse_args(argv)
    groups: dict[str, list[Run]] = {}
    for given in args.runs:
        name, _, folders = given.rpartition('=')
        name = name or Path(folders).name
        if name in groups:
            raise ConfigError(f'two groups are called {name}; give them names: NAME=WORK_DIR.')
        groups[name] = [read_run(folder) for folder in folders.split(',')]
    metric = choose_metric([run for runs in groups.values() for run in runs], args.metric)
    rows = summary({name: [run.final(metric) for run in runs] for name, runs in groups.items()})
    out = draw_curves_of_runs(groups, metric, Path(args.out) / 'runs.png')
    for row, runs in zip(rows, groups.values(), strict=True):
        row['seconds_per_step'] = float(np.mean([run.seconds for run in runs]))
        row['memory_mb'] = float(np.mean([run.memory for run in runs]))
    write_csv(out.with_suffix('.csv'), rows)
    print(f'{metric}\n{as_table(rows)}')
    for row in rows:
        print(f'{row["name"]}: {row["seconds_per_step"]:.3f} s a step, {row["memory_mb"]:.0f} MB')
    print(out, out.with_suffix('.csv'))


if __name__ == '__main__':
    sys.exit(cli.main(main))
