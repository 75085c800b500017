"""Compile the Triton kernels for a GPU without one: prints registers, spills, shared memory and instructions."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from mmgate.benchmarks.kernel_code import CAPABILITIES, CAPABILITY, ITEMSIZE, OPS, listings


def main() -> None:
    """Parse arguments, compile, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--op', choices=OPS, default=OPS[0])
    parser.add_argument('--dtype', choices=sorted(ITEMSIZE), nargs='+', default=['fp32', 'bf16'])
    parser.add_argument('--dim', type=int, choices=[16, 32, 64, 128], nargs='+', default=[16, 32, 64, 128])
    parser.add_argument('--bias', type=int, choices=[0, 1, 2], default=0, help='of plug_attention: none, padding, full')
    parser.add_argument('--gate', choices=['shared', 'per_head'], default='shared', help='of plug_attention')
    parser.add_argument(
        '--capability', type=int, choices=CAPABILITIES, default=CAPABILITY, help='of the GPU: 90 = sm_90'
    )
    parser.add_argument('--out', type=Path, help='JSON to write, with the count of every opcode')
    args = parser.parse_args()
    rows = []
    columns = ('kernel', 'dtype', 'channels', 'block', 'registers', 'bytes spilled', 'KiB shared', 'instructions')
    columns += ('special', 'in flight', 'hazards')
    print(f'| {" | ".join(columns)} |\n{"|---" * len(columns)}|')
    for dtype in args.dtype:
        for dim in args.dim:
            for row in listings(args.op, dtype, dim, args.bias, args.capability, args.gate == 'shared'):
                rows.append(asdict(row))
                print(
                    f'| {row.kernel} | {dtype} | {dim} | {row.block} | {row.registers} | {row.spilled} '
                    f'| {row.shared / 1024:.0f} | {row.instructions} | {row.special} | {row.in_flight} '
                    f'| {len(row.hazards)} |',
                    flush=True,
                )
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1) + '\n')
        print(f'written to {args.out}')


if __name__ == '__main__':
    main()
