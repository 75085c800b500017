"""Check which backends run on this machine, and time them: ``python -m mmgate.doctor``.

It prints one page for a bug report: packages, the backends of every operator in the order of ``'auto'``, with the
reason why one cannot run, and a comparison of each with the float64 reference, of output and gradients. ``--time`` adds
times at the sizes of encoders and decoders. ``--build`` compiles the CPU kernels and does no more. The exit status is 1
if a backend that can run here fails the comparison.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line of ``python -m mmgate.doctor`` and return its exit status."""
    parser = argparse.ArgumentParser(prog='python -m mmgate.doctor', description=__doc__.split('\n')[0])
    parser.add_argument('--time', action='store_true', help='print times of the backends, too')
    parser.add_argument('--device', help='default: cuda, if torch sees it, else cpu')
    dtypes = ('bfloat16', 'float16', 'float32')
    parser.add_argument('--dtype', choices=dtypes, nargs='+', help='default: float32; on CUDA all')
    parser.add_argument('--build', action='store_true', help="compile the CPU kernels ('native'), and do no more")
    args = parser.parse_args(argv)
    from mmgate.benchmarks import backends  # which imports torch

    if args.build:
        return backends.build_native()
    return int(not backends.examine(args.device, args.dtype, timed=args.time))


if __name__ == '__main__':
    sys.exit(main())
