"""Measure an operator's backends beside other packages (peers), print a table and write a CSV."""

import argparse
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from mmgate.benchmarks import ops
from mmgate.benchmarks.measure import Row, times_table, told, write_csv

BENCHMARKS = {
    ('ms_deform_attn', 'cpu'): ops.benchmark_ms_deform_attn_on_cpu,
    ('plug_attention', 'cpu'): partial(ops.benchmark_plug_attention, device='cpu'),
    ('gated_layers', 'cpu'): ops.benchmark_gated_layers,
    ('ms_deform_attn', 'cuda'): ops.benchmark_ms_deform_attn,
    ('plug_attention', 'cuda'): ops.benchmark_plug_attention,
}


def main(argv: list[str]) -> None:
    """Parse arguments, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--op', choices=sorted({op for op, _ in BENCHMARKS}), default='ms_deform_attn')
    parser.add_argument('--device', choices=sorted({device for _, device in BENCHMARKS}), default='cpu')
    parser.add_argument('--out', type=Path, help='CSV to write (default: work_dirs/benchmark_OP_DEVICE.csv)')
    parser.add_argument('--repetitions', type=int, default=7)
    threads = "torch's threads on a CPU; with several numbers everything is measured with each (default: 1 2)"
    parser.add_argument('--threads', type=int, nargs='+', default=[1, 2], help=threads)
    args = parser.parse_args(argv)
    if (args.op, args.device) not in BENCHMARKS:
        parser.error(f'there is no benchmark of {args.op} on {args.device}')
    if args.device == 'cuda' and not torch.cuda.is_available():
        parser.error('torch sees no CUDA device')
    out = args.out or Path(f'work_dirs/benchmark_{args.op}_{args.device}.csv')
    rows = write_csv(told(measured(args)), out)
    if (args.op, args.device) == ('ms_deform_attn', 'cpu'):
        print(times_table(rows, 'native'))
    print(f'written to {out}')


def measured(args: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows of the benchmark, on a CPU with each number of threads."""
    benchmark = BENCHMARKS[args.op, args.device]
    if args.device == 'cuda':
        yield from benchmark(args.repetitions)
        return
    for threads in args.threads:
        torch.set_num_threads(threads)
        yield from benchmark(args.repetitions)


if __name__ == '__main__':
    main(sys.argv[1:])
