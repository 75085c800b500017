"""Run a study of several configs and seeds, resume stopped runs, write results.csv, table.md and curves.png."""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from mmgate.analysis.arguments import add_processes, plain_parser, positive, run


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = plain_parser(__doc__)
    parser.add_argument('study', help='a file of configs/studies')
    parser.add_argument('--out', help='folder of the runs (default: work_dirs/<name of the study>[-<budget>])')
    parser.add_argument('--budget', help="one of the study's budgets, such as gpu")
    parser.add_argument('--max-runs', type=positive, help='stop after this many runs; the next call goes on')
    parser.add_argument('--report-only', action='store_true', help='run nothing')
    add_processes(parser)
    return parser


def main(argv: list[str]) -> None:
    """Parse arguments, run missing runs, write the report."""
    args = parser().parse_args(argv)
    from mmgate.analysis.trials.study import alone, read_study, report_study, run_study
    from mmgate.errors import ConfigError

    study = read_study(args.study)
    if args.launcher == 'pytorch':
        study = replace(study, processes=args.processes or max(2, study.processes))
    out = Path(args.out or f'work_dirs/{Path(args.study).stem}{f"-{args.budget}" if args.budget else ""}')
    left = 0
    if not args.report_only:
        with alone(out):
            left = run_study(study, out, budget=args.budget, most=args.max_runs)
    try:
        print(report_study(study, out, budget=args.budget))
    except ConfigError as error:
        if not left:
            raise
        print(f'no table yet: {error}')
    if left:
        print(f'{left} runs are left; the same command goes on.')


if __name__ == '__main__':
    sys.exit(run(parser, main))
