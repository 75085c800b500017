"""Measure an operator's backends beside other packages (peers), print a table and write a CSV."""

import argparse
from functools import partial
from pathlib import Path

import torch

from mmgate.benchmarks import ops
from mmgate.benchmarks.measure import told, write_csv

BENCHMARKS = {
    ('ms_deform_attn', 'cpu'): ops.benchmark_ms_deform_attn_on_cpu,
    ('plug_attention', 'cpu'): partial(ops.benchmark_plug_attention, device='cpu'),
    ('gated_layers', 'cpu'): ops.benchmark_gated_layers,
    ('ms_deform_attn', 'cuda'): ops.benchmark_ms_deform_attn,
    ('plug_attention', 'cuda'): ops.benchmark_plug_attention,
}


def main() -> None:
    """Parse arguments, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--op', choices=sorted({op for op, _ in BENCHMARKS}), default='ms_deform_attn')
    parser.add_argument('--device', choices=sorted({device for _, device in BENCHMARKS}), default='cpu')
    parser.add_argument('--out', type=Path, help='CSV to write (default: work_dirs/benchmark_OP_DEVICE.csv)')
    parser.add_argument('--repetitions', type=int, default=7)
    parser.add_argument('--threads', type=int, help="torch's threads (default: all)")
    args = parser.parse_args()
    if (args.op, args.device) not in BENCHMARKS:
        parser.error(f'there is no benchmark of {args.op} on {args.device}')
    if args.device == 'cuda' and not torch.cuda.is_available():
        parser.error('torch sees no CUDA device')
    if args.threads:
        torch.set_num_threads(args.threads)
    out = args.out or Path(f'work_dirs/benchmark_{args.op}_{args.device}.csv')
    write_csv(told(BENCHMARKS[args.op, args.device](args.repetitions)), out)
    print(f'written to {out}')


if __name__ == '__main__':
    main()
