"""What this machine can run, whether it is right and how fast it is: ``python -m mmgate.doctor``.

One page for a bug report: packages, backends of every operator and why one cannot run, and whether each agrees with
the float64 reference, output and gradients. ``--calibrate`` does so at the sizes of encoders and decoders, takes the
times, and has ``backend='auto'`` take the fastest from then on. Each backend runs in a process of its own, which may
crash. The exit status is 1 if something that can run here is out.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from mmgate.benchmarks.calibration import DTYPES, compare, keep
from mmgate.ops import backend as choice

PACKAGES = ('torch', 'triton', 'mmgate', 'mmengine', 'mmcv', 'mmdet', 'mmseg', 'numpy')


def main(argv: Sequence[str] | None = None) -> int:
    """Examine, print and return the exit status."""
    parser = argparse.ArgumentParser(prog='python -m mmgate.doctor', description=__doc__.split('\n')[0])
    parser.add_argument('--calibrate', action='store_true', help="time all backends and keep the fastest for 'auto'")
    parser.add_argument('--json', action='store_true', help='print JSON')
    parser.add_argument('--device', help='default: the accelerator that torch sees, else the CPU')
    parser.add_argument('--dtype', choices=sorted(DTYPES), nargs='+', help='default: float32; on CUDA all')
    parser.add_argument('--sizes', choices=['full', 'tiny', 'none'], help='default: full with --calibrate, else tiny')
    parser.add_argument('--limit', type=int, default=60, help='seconds after which a call counts as hung (60)')
    args = parser.parse_args(argv)
    device = torch.device(args.device or _accelerator())
    dtypes = args.dtype or (list(DTYPES) if device.type == 'cuda' else ['float32'])
    scale = args.sizes or ('full' if args.calibrate else 'tiny')
    rows = [] if scale == 'none' else list(compare(device, dtypes, scale, args.limit))
    report: dict[str, Any] = dict(python=platform.python_version(), packages=_packages())
    report |= dict(device=choice.machine(device), calibration=choice.path(), rows=[asdict(row) for row in rows])
    report['backends'] = [
        dict(op=op, backend=backend.name, why_not=backend.why_not(torch.empty(1, 1, 1, 1, device=device)))
        for op, backends in choice.OPERATORS.items()
        for backend in backends
    ]
    if args.calibrate and scale == 'full':  # the fastest of tiny calls says nothing of real ones
        keep(rows, device)
    names = {op: choice.winners(op, device.type, device.index) for op in choice.OPERATORS}
    report['auto'] = [dict(op=op, call=call, backend=name) for op in names for call, name in names[op].items()]
    print(json.dumps(report, indent=1) if args.json else page(report, timed=args.calibrate or scale == 'full'))
    return int(any(row.out for row in rows))


def _packages() -> dict[str, str | None]:
    """Return versions, with the distribution where it has another name than the package."""
    found: dict[str, str | None] = {}
    distributions = importlib.metadata.packages_distributions()
    for name in PACKAGES:
        distribution = distributions.get(name, [name])[0]
        try:
            version = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            version = None
        found[name] = version if distribution == name else f'{version} ({distribution})'
    return found | dict(cuda=torch.version.cuda or torch.version.hip)


def _accelerator() -> str:
    if hasattr(torch, 'accelerator') and torch.accelerator.is_available():  # torch 2.6
        return str(torch.accelerator.current_accelerator())
    return 'cuda' if torch.cuda.is_available() else 'cpu'


def page(report: dict[str, Any], timed: bool) -> str:
    """Return the findings as text, with times where they mean something."""
    versions = ', '.join(f'{name} {version or "-"}' for name, version in report['packages'].items())
    lines = [f'python {report["python"]}, {versions}', report['device'], '', 'Backends']
    lines += [f'  {x["op"]:16} {x["backend"]:12} {x["why_not"] or "can run"}' for x in report['backends']]
    lines += ['', 'Beside the float64 reference, output and every gradient' + timed * '; ms forward, forward+backward']
    for x in report['rows']:
        times = ' '.join(f'{y:10.4g}' for y in x['ms'].values()) if timed else ''
        lines.append(f'  {x["op"]:16} {x["dtype"]:9} {x["size"]:7} {x["backend"]:12} {x["out"] or f"agrees {times}"}')
    lines += ['', f"What 'auto' takes, by {report['calibration'] or 'no file'}"]
    lines += [f'  {x["op"]:16} {x["call"]:24} {x["backend"]}' for x in report['auto']]
    if not report['auto']:
        lines.append('  the first of the order above that can run: nothing is calibrated here (--calibrate)')
    return '\n'.join(lines)


if __name__ == '__main__':
    sys.exit(main())
