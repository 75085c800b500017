"""Check which backends run on this machine, and time them: ``python -m mmgate.doctor``.

It prints one page for a bug report: packages, the backends of every operator with the reason why one cannot run, and a
comparison of each with the float64 reference, of output and gradients. ``--calibrate`` compares at the sizes of
encoders and decoders, takes the times, and keeps the fastest for ``backend='auto'``. Each backend runs in a separate
process, which may crash. ``--build`` compiles the CPU kernel first. The exit status is 1 if a backend that can run here
fails the comparison.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import platform
import sys
from collections.abc import Sequence

import torch

from mmgate import mmcv_ext
from mmgate.benchmarks.calibration import DTYPES, Row, compare, keep
from mmgate.ops import backend as choice
from mmgate.ops import native as library
from mmgate.ops.ms_deform_attn import native

PACKAGES = ('torch', 'triton', 'mmgate', 'mmengine', 'mmcv', 'mmdet', 'mmseg', 'numpy')


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line of ``python -m mmgate.doctor`` and return its exit status."""
    parser = argparse.ArgumentParser(prog='python -m mmgate.doctor', description=__doc__.split('\n')[0])
    parser.add_argument('--calibrate', action='store_true', help="time all backends and keep the fastest for 'auto'")
    parser.add_argument('--device', help='default: cuda, if torch sees it, else cpu')
    parser.add_argument('--dtype', choices=sorted(DTYPES), nargs='+', help='default: float32; on CUDA all')
    parser.add_argument('--sizes', choices=['full', 'tiny'], help='default: full with --calibrate, else tiny')
    parser.add_argument('--limit', type=int, default=60, help='seconds after which a call counts as hung (60)')
    parser.add_argument('--build', action='store_true', help="compile the CPU kernels ('native'), and do no more")
    args = parser.parse_args(argv)
    if args.build:
        return build_native()
    device = torch.device(args.device or ('cuda' if torch.cuda.is_available() else 'cpu'))
    dtypes = args.dtype or (list(DTYPES) if device.type == 'cuda' else ['float32'])
    scale = args.sizes or ('full' if args.calibrate else 'tiny')
    timed = args.calibrate or scale == 'full'
    print(before(device, timed), flush=True)
    rows: list[Row] = []
    # Rows are printed as they come, and an operator's choices kept once it is compared, so that a run which is ended
    # has what it found. Times of tiny calls mean nothing for real ones.
    for _, of_operator in itertools.groupby(compare(device, dtypes, scale, args.limit), lambda row: row.op):
        found = []
        for row in of_operator:
            found.append(row)
            print(line(row, timed), flush=True)
        if args.calibrate and scale == 'full':
            keep(found, device)
        rows += found
    print(choices(device))
    return int(any(row.out for row in rows))


def build_native() -> int:
    """Compile the CPU kernel of deformable attention and return the exit status."""
    try:
        print(f'compiled {library.build.build()}')
    except RuntimeError as error:
        print(f'The CPU kernel is not compiled: {error}')
        return 1
    library.load.cache_clear()
    why_not = native.why_not(torch.empty(0))
    print(why_not or "'native' runs from now on")
    return int(why_not is not None)


def _packages() -> str:
    """Return a text with the versions of the installed packages, and their distribution if it has another name."""
    found = [f'python {platform.python_version()}']
    distributions = importlib.metadata.packages_distributions()
    for name in PACKAGES:
        distribution = distributions.get(name, [name])[0]
        try:
            version = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            version = '-'
        found.append(f'{name} {version}' + f' ({distribution})' * (distribution != name))
    return ', '.join([*found, f'cuda {torch.version.cuda or torch.version.hip or "-"}'])


def before(device: torch.device, timed: bool) -> str:
    """Return the first part of the doctor's page: versions, and the reasons why backends cannot run."""
    lines = [_packages(), choice.machine(device)]
    if mmcv_ext.provided():
        lines.append(f'mmcv has no compiled operators: {mmcv_ext.IN_TORCH}')
    lines += ['', 'Backends']
    for op, backends in choice.OPERATORS.items():
        heads = torch.empty(1, 1, 1, 1, device=device)
        order = choice.ordered(backends, heads)
        for backend in [*order, *(x for x in backends if x not in order)]:
            why_not = backend.why_not(heads)
            lines.append(f'  {op:16} {backend.name:20} {why_not or "can run"}')
    lines += ['', 'Beside the float64 reference, output and every gradient' + timed * '; ms forward, forward+backward']
    return '\n'.join(lines)


def line(row: Row, timed: bool) -> str:
    """Return the line of the doctor's page for one backend's result; ``timed`` adds its times."""
    times = ' '.join(f'{ms:10.4g}' for ms in row.ms.values()) if timed else ''
    return f'  {row.op:16} {row.dtype:9} {row.size:7} {row.backend:20} {row.out or f"agrees {times}"}'


def choices(device: torch.device) -> str:
    """Return the end of the doctor's page: the backends that ``'auto'`` takes after the calibration."""
    lines = ['', f"Choices of 'auto', by {choice.path() or 'no file'}"]
    winners = {op: choice.winners(op, device.type, device.index) for op in choice.OPERATORS}
    lines += [f'  {op:16} {call:24} {name}' for op, calls in winners.items() for call, name in calls.items()]
    if not any(winners.values()):
        lines.append('  the first of the order above that can run: nothing is calibrated here (--calibrate)')
    return '\n'.join(lines)


if __name__ == '__main__':
    sys.exit(main())
