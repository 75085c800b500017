"""Measure training steps or predictions of a peer's config and of ours on random images, print and write a table."""

import argparse
import sys
from copy import deepcopy
from pathlib import Path

from mmgate.analysis.arguments import plain_parser, run
from mmgate.mm.gate_options import add_gate_option

CONFIGS = Path(__file__).parents[2] / 'configs'
OURS = CONFIGS / 'plug/deformable_detr/plug-deformable-detr-refine_r50_8xb4-50e_coco.py'


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = plain_parser(__doc__)
    parser.add_argument('--peer', default='mmdet::deformable_detr/deformable-detr-refine_r50_16xb2-50e_coco.py')
    parser.add_argument('--ours', help="default: PLuG's Deformable DETR, and with --gate the peer's config")
    add_gate_option(parser)
    shown = 'measure predictions, as tools/test.py makes them, not training steps'
    parser.add_argument('--inference', action='store_true', help=shown)
    parser.add_argument('--op', choices=['ms_deform_attn', 'plug_attention'], default='ms_deform_attn')
    parser.add_argument('--backends', nargs='+', default=['auto'], help="of ours, such as 'mmcv triton'")
    shown = "of ours with the backend that it chooses, one at a time, such as 'groups'; all but graphs together: all"
    parser.add_argument('--speedups', nargs='+', default=[], help=shown)
    parser.add_argument('--train', choices=('gates', 'attention', 'all'), default='all', help='what of ours trains')
    parser.add_argument('--size', type=int, nargs=2, default=[800, 1333], metavar=('HEIGHT', 'WIDTH'))
    parser.add_argument('--batch', type=int, help='images at a time (default: 2, and 1 with --inference)')
    parser.add_argument('--repetitions', type=int, default=20)
    parser.add_argument('--device', default='cuda')
    shown = 'of all threads: for a CPU that does other things beside'
    parser.add_argument('--processor-time', action='store_true', help=shown)
    shown = 'mixed precision (float16 if not named)'
    parser.add_argument('--amp', nargs='?', choices=['float16', 'bfloat16'], const='float16', help=shown)
    parser.add_argument('--tf32', action='store_true', help='float32 products in TF32 on both sides')
    parser.add_argument('--out', type=Path, help='CSV (default: work_dirs/benchmark_training.csv or _inference.csv)')
    return parser


def main(argv: list[str]) -> None:
    """Parse arguments, measure, print and write."""
    args = parser().parse_args(argv)
    import torch
    from mmengine.logging import MMLogger

    from mmgate.benchmarks.measure import told, write_csv
    from mmgate.benchmarks.training import benchmark_training
    from mmgate.mm.config_file import read_config
    from mmgate.mm.gate_options import put_rules
    from mmgate.mm.speedups import SPEEDUPS

    unknown = sorted(set(args.speedups) - {*SPEEDUPS, 'all'})
    if unknown:
        parser().error(f'--speedups {" ".join(unknown)}: give some of {", ".join(SPEEDUPS)}, or all')
    if args.device.startswith('cuda'):
        if not torch.cuda.is_available():
            parser().error('torch sees no CUDA device; --device cpu measures there')
    elif args.amp:
        parser().error('--amp is for CUDA, mmengine has it nowhere else here')
    MMLogger.get_current_instance().setLevel('ERROR')
    ours = read_config(args.ours or (args.peer if args.gate else str(OURS)))
    optimizer = deepcopy(ours.get('optim_wrapper'))
    put_rules(ours, args.gate)
    if optimizer is not None:
        # The constructor of gates also merges parameter groups and fuses the optimizer, which --speedups measures.
        ours.optim_wrapper = optimizer
    batch = args.batch or (1 if args.inference else 2)
    options = dict(op=args.op, backends=args.backends, speedups=args.speedups, size=tuple(args.size), batch=batch)
    options |= dict(amp=args.amp, device=args.device, processor_time=args.processor_time, train=args.train)
    options |= dict(tf32=args.tf32, inference=args.inference, repetitions=args.repetitions)
    out = args.out or Path(f'work_dirs/benchmark_{"inference" if args.inference else "training"}.csv')
    write_csv(told(benchmark_training(args.peer, ours, **options)), out)
    print(f'written to {out}')


if __name__ == '__main__':
    sys.exit(run(parser, main))
