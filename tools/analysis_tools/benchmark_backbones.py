"""Measure backbones over the image size: prints a table, writes a CSV and draws the curves."""

import argparse
from pathlib import Path

import torch
from mmengine.logging import MMLogger

from mmgate.benchmarks.backbones import SUITES, benchmark_backbones, draw_curves
from mmgate.benchmarks.measure import MODES, told, write_csv


def main() -> None:
    """Parse arguments, measure, print, write and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--suite', choices=sorted(SUITES), default='pvt-t')
    parser.add_argument('--sizes', type=int, nargs='+', default=[224, 512, 800, 1280], help='sides of square images')
    parser.add_argument('--batch', type=int, default=1)
    parser.add_argument('--mode', choices=MODES, help='default: both')
    parser.add_argument('--device', default='cpu')
    parser.add_argument('--autocast', action='store_true', help='bfloat16 where autocast takes it')
    parser.add_argument('--repetitions', type=int, default=3)
    parser.add_argument('--threads', type=int, help="torch's threads (default: all)")
    parser.add_argument(
        '--out', type=Path, help='CSV to write, and PNG beside it (default: work_dirs/backbones_SUITE.csv)'
    )
    args = parser.parse_args()
    if args.device.startswith('cuda') and not torch.cuda.is_available():
        parser.error('torch sees no CUDA device')
    if args.threads:
        torch.set_num_threads(args.threads)
    MMLogger.get_current_instance().setLevel('ERROR')
    modes = [args.mode] if args.mode else MODES
    options = dict(batch=args.batch, repetitions=args.repetitions, modes=modes)
    rows = benchmark_backbones(args.suite, args.sizes, device=args.device, autocast=args.autocast, **options)
    out = args.out or Path(f'work_dirs/backbones_{args.suite}.csv')
    written = write_csv(told(rows), out)
    picture = draw_curves(written, out.with_suffix('.png'))
    print(f'written to {out} and {picture}')


if __name__ == '__main__':
    main()
