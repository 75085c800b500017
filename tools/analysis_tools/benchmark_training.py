"""Measure whole training steps of a peer's config and of ours on random images: prints a table and writes a CSV."""

import argparse
import sys
from pathlib import Path

import torch
from mmengine.logging import MMLogger

from mmgate.benchmarks.ops import Row, write_csv
from mmgate.benchmarks.training import SPEEDUPS, benchmark_training, profile_training
from mmgate.gates import TRAINS
from mmgate.train import cli

CONFIGS = Path(__file__).parents[2] / 'configs'


def main(argv: list[str]) -> None:
    """Parse arguments, measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        '--peer', default=str(CONFIGS / 'vanilla/deformable_detr/deformable-detr-refine_r50_8xb4-50e_coco.py')
    )
    parser.add_argument(
        '--ours', default=str(CONFIGS / 'plug/deformable_detr/plug-deformable-detr-refine_r50_8xb4-50e_coco.py')
    )
    parser.add_argument('--op', choices=['ms_deform_attn', 'plug_attention'], default='ms_deform_attn')
    parser.add_argument('--backends', nargs='+', default=['auto'], help="of ours, such as 'mmcv triton'")
    parser.add_argument(
        '--speedups',
        nargs='+',
        default=[],
        choices=[*SPEEDUPS, 'all'],
        help='of ours with the backend that it chooses, one at a time; all of them together: all',
    )
    parser.add_argument('--train', choices=TRAINS, default='all', help='what of ours trains')
    parser.add_argument('--profile', action='store_true', help="print the profile of ours with all speedups' step, too")
    parser.add_argument('--size', type=int, nargs=2, default=[800, 1333], metavar=('HEIGHT', 'WIDTH'))
    parser.add_argument('--batch', type=int, default=2)
    parser.add_argument('--repetitions', type=int, default=20)
    parser.add_argument('--device', default='cuda')
    parser.add_argument(
        '--processor-time', action='store_true', help='of all threads: for a CPU that does other things beside'
    )
    parser.add_argument('--amp', action='store_true', help='mixed precision in bfloat16')
    parser.add_argument('--out', type=Path, default=Path('work_dirs/benchmark_training.csv'), help='CSV to write')
    args = parser.parse_args(argv)
    if args.device.startswith('cuda'):
        if not torch.cuda.is_available():
            parser.error('torch sees no CUDA device; --device cpu measures there')
    elif args.amp:
        parser.error('--amp is for CUDA, mmengine has it nowhere else here')
    MMLogger.get_current_instance().setLevel('ERROR')
    setting = dict(size=tuple(args.size), batch=args.batch, amp=args.amp, device=args.device)
    options = dict(op=args.op, backends=args.backends, speedups=args.speedups, **setting)
    options.update(processor_time=args.processor_time, train=args.train)
    rows: list[Row] = []
    print(f'{"metric":20} {"model":64} {"median":>10} {"20 %":>10} {"80 %":>10}  peer/ours')
    for row in benchmark_training(args.peer, args.ours, repetitions=args.repetitions, **options):
        rows.append(row)
        figures = ' '.join(f'{y:10.2f}' for y in (row.y_50, row.y_20, row.y_80))
        print(f'{row.metric + " " + row.unit:20} {row.provider:64} {figures}  {row.ratio_to_peer:6.2f}', flush=True)
    write_csv(rows, args.out)
    print(f'written to {args.out}')
    if args.profile:
        print(profile_training(args.ours, speedups=list(SPEEDUPS), **setting))


if __name__ == '__main__':
    sys.exit(cli.main(main))
