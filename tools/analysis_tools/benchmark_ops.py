"""Measure an operator's backends beside other packages (peers), print a table and write a CSV."""

import argparse
import sys
from functools import partial
from pathlib import Path

from mmgate.analysis.arguments import plain_parser, positive, run

OPS = ('ms_deform_attn', 'plug_attention', 'gated_layers')


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = plain_parser(__doc__)
    parser.add_argument('--op', choices=OPS, default='ms_deform_attn')
    parser.add_argument('--device', choices=['cpu', 'cuda'], default='cpu')
    parser.add_argument('--out', type=Path, help='CSV to write (default: work_dirs/benchmark_OP_DEVICE.csv)')
    parser.add_argument('--repetitions', type=positive, default=7)
    threads = "torch's threads on a CPU; with several numbers everything is measured with each (default: 1 2)"
    parser.add_argument('--threads', type=positive, nargs='+', default=[1, 2], help=threads)
    return parser


def main(argv: list[str]) -> None:
    """Parse arguments, measure and print."""
    args = parser().parse_args(argv)
    import torch

    from mmgate.benchmarks import ops
    from mmgate.benchmarks.measure import told, write_csv

    benchmark = {
        ('ms_deform_attn', 'cpu'): partial(ops.benchmark_ms_deform_attn, device='cpu'),
        ('plug_attention', 'cpu'): partial(ops.benchmark_plug_attention, device='cpu'),
        ('gated_layers', 'cpu'): ops.benchmark_gated_layers,
        ('ms_deform_attn', 'cuda'): ops.benchmark_ms_deform_attn,
        ('plug_attention', 'cuda'): ops.benchmark_plug_attention,
    }.get((args.op, args.device))
    if benchmark is None:
        parser().error(f'there is no benchmark of {args.op} on {args.device}')
    if args.device == 'cuda' and not torch.cuda.is_available():
        parser().error('torch sees no CUDA device')

    def measured():
        for threads in args.threads if args.device == 'cpu' else [torch.get_num_threads()]:
            torch.set_num_threads(threads)
            yield from benchmark(args.repetitions)

    out = args.out or Path(f'work_dirs/benchmark_{args.op}_{args.device}.csv')
    write_csv(told(measured()), out)
    print(f'written to {out}')


if __name__ == '__main__':
    sys.exit(run(parser, main))
