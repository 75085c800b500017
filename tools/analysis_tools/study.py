"""Run a study, configs times seeds, resuming what was stopped; write results.csv, table.md and curves.png."""

import argparse
import sys
from pathlib import Path

import mmgate  # noqa: F401
from mmgate.analysis.report.study import read_study, report_study, run_study
from mmgate.errors import ConfigError
from mmgate.train import cli


def main(argv: list[str]) -> None:
    """Parse arguments, run what is missing, report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('study', help='a file of configs/studies')
    parser.add_argument('--out', help='folder of the runs (default: work_dirs/<name of the study>[-<budget>])')
    parser.add_argument('--budget', help="one of the study's budgets, such as gpu")
    parser.add_argument('--max-runs', type=int, help='stop after this many runs; the next call goes on')
    parser.add_argument('--report-only', action='store_true', help='run nothing')
    args = parser.parse_args(argv)
    study = read_study(args.study)
    out = Path(args.out or f'work_dirs/{Path(args.study).stem}{f"-{args.budget}" if args.budget else ""}')
    left = 0 if args.report_only else run_study(study, out, budget=args.budget, most=args.max_runs)
    try:
        print(report_study(study, out, budget=args.budget))
    except ConfigError as error:
        if not left:
            raise
        print(f'no table yet: {error}')
    if left:
        print(f'{left} runs are left; the same command goes on.')


if __name__ == '__main__':
    sys.exit(cli.main(main))
