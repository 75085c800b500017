"""Measure an operator's backends beside the peer's: prints a table, writes a CSV and draws it."""

import argparse
from functools import partial
from pathlib import Path

import torch

from mmgate.benchmarks import ops, ops_cuda
from mmgate.benchmarks.ops import Row, write_csv
from mmgate.benchmarks.plots import draw_bars, draw_curves

BENCHMARKS = {
    ('ms_deform_attn', 'cpu'): ops.benchmark_ms_deform_attn,
    ('plug_attention', 'cpu'): partial(ops_cuda.benchmark_plug_attention, device='cpu'),
    ('gated_layers', 'cpu'): ops.benchmark_gated_layers,
    ('ms_deform_attn', 'cuda'): ops_cuda.benchmark_ms_deform_attn,
    ('plug_attention', 'cuda'): ops_cuda.benchmark_plug_attention,
}


def main() -> None:
    """Parse arguments, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--op', choices=sorted({op for op, _ in BENCHMARKS}), default='ms_deform_attn')
    parser.add_argument('--device', choices=sorted({device for _, device in BENCHMARKS}), default='cpu')
    parser.add_argument(
        '--out', type=Path, help='CSV to write, and PNG beside it (default: work_dirs/benchmark_OP_DEVICE.csv)'
    )
    parser.add_argument('--repetitions', type=int, default=7)
    parser.add_argument('--threads', type=int, help="torch's threads (default: all)")
    args = parser.parse_args()
    if (args.op, args.device) not in BENCHMARKS:
        parser.error(f'there is no benchmark of {args.op} on {args.device}')
    if args.device == 'cuda' and not torch.cuda.is_available():
        parser.error('torch sees no CUDA device')
    if args.threads:
        torch.set_num_threads(args.threads)
    rows: list[Row] = []
    print(f'{"x":14} {"mode":17} {"metric":12} {"provider":24} {"median":>10} {"20 %":>10} {"80 %":>10}  peer/ours')
    for row in BENCHMARKS[args.op, args.device](args.repetitions):
        rows.append(row)
        name = f'{row.metric} {row.unit}'
        figures = ' '.join(f'{y:10.2f}' for y in (row.y_50, row.y_20, row.y_80))
        print(
            f'{row.x:14} {row.mode:17} {name:12.12} {row.provider:24} {figures}  {row.ratio_to_peer:6.2f}', flush=True
        )
    out = args.out or Path(f'work_dirs/benchmark_{args.op}_{args.device}.csv')
    write_csv(rows, out)
    picture = out.with_suffix('.png')
    if args.op == 'plug_attention':
        draw_curves(rows, picture, number=lambda x: int(x[1:]), xlabel='tokens', logarithmic=True)
    else:
        draw_bars(rows, picture)
    print(f'written to {out} and {picture}')


if __name__ == '__main__':
    main()
