"""Compare runs: a metric over time, final values with mean, spread and a paired test over seeds, time and memory.

Example: compare_runs.py vanilla=work_dirs/v0,work_dirs/v1 plug=work_dirs/p0,work_dirs/p1 --out out
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import mmgate  # noqa: F401
from mmgate.analysis.loading import write_csv
from mmgate.analysis.report.runs import Run, as_table, choose_metric, draw_curves_of_runs, read_run, summary
from mmgate.errors import ConfigError
from mmgate.train import cli


def main(argv: list[str]) -> None:
    """Parse arguments, read the logs, draw, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('runs', nargs='+', help='WORK_DIR, or NAME=WORK_DIR,WORK_DIR,... for seeds in one order')
    parser.add_argument('--metric', help='default: box AP, mask AP, mIoU or accuracy, the first that all have')
    parser.add_argument('--out', required=True, help='folder for picture and CSV')
    args = parser.parse_args(argv)
    groups: dict[str, list[Run]] = {}
    for given in args.runs:
        name, _, listed = ('', '', given) if Path(given).is_dir() or '=' not in given else given.partition('=')
        folders = listed.split(',')
        name = name or Path(folders[0]).name
        if name in groups:
            raise ConfigError(f'two groups are called {name}; give them names: NAME=WORK_DIR.')
        if len({Path(folder).resolve() for folder in folders}) < len(folders):
            raise ConfigError(f'{name}: a work dir is given twice; a run counts once.')
        groups[name] = [read_run(folder) for folder in folders]
    metric = choose_metric([run for runs in groups.values() for run in runs], args.metric)
    rows = summary({name: [run.final(metric) for run in runs] for name, runs in groups.items()})
    out = draw_curves_of_runs(groups, metric, Path(args.out) / 'runs.png')
    for row, runs in zip(rows, groups.values(), strict=True):
        row['seconds_per_step'] = float(np.mean([run.seconds for run in runs]))
        row['memory_mb'] = float(np.mean([run.memory for run in runs]))
    write_csv(out.with_suffix('.csv'), rows)
    print(f'{metric}\n{as_table(rows)}')
    for problem in unpaired(groups):
        print(f'warning: {problem}', file=sys.stderr)
    for row in rows:
        memory = '' if np.isnan(row['memory_mb']) else f', {row["memory_mb"]:.0f} MB of GPU'
        print(f'{row["name"]}: {row["seconds_per_step"]:.3f} s a step{memory}')
    print(out, out.with_suffix('.csv'))


def unpaired(groups: dict[str, list[Run]]) -> Iterator[str]:
    """Yield why the runs of a group are no pairs with those of the first."""
    (first, baseline), *others = groups.items()
    for name, runs in others:
        if len(runs) != len(baseline):
            yield f'{name} has {len(runs)} runs and {first} {len(baseline)}, so they are not compared in pairs.'
            continue
        seeds = [[run.seed for run in listed] for listed in (baseline, runs)]
        if None not in (*seeds[0], *seeds[1]) and seeds[0] != seeds[1]:
            yield f'the seeds of {first} are {seeds[0]}, those of {name} {seeds[1]}: they are no pairs.'


if __name__ == '__main__':
    sys.exit(cli.main(main))
