"""What this machine can run, whether it is right and how fast it is: ``python -m mmgate.doctor``.

One page for a bug report or a table of kernels: packages, backends of every operator and why one cannot run, agreement
of each with the float64 reference, and times of the usual shapes. The exit status is 1 if something that can run here
disagrees with the reference.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

PACKAGES = ('torch', 'triton', 'mmgate', 'mmengine', 'mmcv', 'mmdet', 'mmseg', 'numpy')
FORKS = {
    'mmengine': 'onedl-mmengine',
    'mmcv': 'onedl-mmcv',
    'mmdet': 'onedl-mmdetection',
    'mmseg': 'onedl-mmsegmentation',
}
ORIGINALS = {'mmseg': 'mmsegmentation'}
DTYPES = {'float32': torch.float32, 'float16': torch.float16, 'bfloat16': torch.bfloat16}
LEVELS = [(100, 167), (50, 84), (25, 42), (13, 21)]  # of an image of 800 x 1333
SMALL_LEVELS = [(4, 6), (2, 3)]
# name: (queries, None for one a pixel; columns of the reference points)
SAMPLERS: dict[str, tuple[int | None, int]] = {
    'encoder': (None, 2),
    'Deformable DETR decoder': (300, 2),
    'DINO decoder': (900, 4),
}
TOKENS = (100, 1024, 4096)
SMALL_TOKENS = (24,)


def main(argv: Sequence[str] | None = None) -> int:
    """Examine, print and return the exit status."""
    parser = argparse.ArgumentParser(prog='python -m mmgate.doctor', description=__doc__.split('\n')[0])
    parser.add_argument('--json', action='store_true', help='print JSON')
    parser.add_argument('--device', help='default: the accelerator that torch sees, else the CPU')
    parser.add_argument('--dtype', choices=sorted(DTYPES), nargs='+', help='default: float32, beside bfloat16 on CUDA')
    parser.add_argument('--shapes', choices=['usual', 'small', 'none'], default='usual', help='what is timed')
    args = parser.parse_args(argv)
    device = torch.device(args.device or _accelerator())
    dtypes = args.dtype or (['float32', 'bfloat16'] if device.type == 'cuda' else ['float32'])
    report = examine(device, dtypes, args.shapes)
    print(json.dumps(report, indent=1) if args.json else page(report))
    return int(any(row['disagrees'] for row in report['agreement']))


def examine(device: torch.device, dtypes: Sequence[str], shapes: str) -> dict[str, Any]:
    """Return all findings as what JSON holds.

    Args:
        device: Where to run.
        dtypes: Keys of :data:`DTYPES`.
        shapes: ``'usual'``, ``'small'`` (of the times alone) or ``'none'``.
    """
    from mmgate.ops import choices

    report: dict[str, Any] = dict(
        python=platform.python_version(), packages=_packages(), device=choices.machine(device)
    )
    report['backends'] = [
        dict(op=op, backend=backend.name, why_not=backend.why_not(torch.empty(1, 1, 1, 1, device=device)))
        for op, backends, _ in _operators()
        for backend in backends
    ]
    report['agreement'] = list(_agreement(device, dtypes))
    report['times'] = [] if shapes == 'none' else list(_times(device, dtypes, shapes == 'small'))
    return report


def _operators() -> list[tuple[str, Any, Any]]:
    from mmgate.ops import ms_deform_attn as sampler_function  # noqa: F401  (imports both packages)

    packages = [(op, sys.modules[f'mmgate.ops.{op}']) for op in ('ms_deform_attn', 'plug_attention')]
    return [(op, package.BACKENDS, package.PROBLEMS) for op, package in packages]


def _packages() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        found[name] = None
        for distribution in (name, FORKS.get(name), ORIGINALS.get(name)):
            if distribution is None:
                continue
            try:
                version = importlib.metadata.version(distribution)
            except importlib.metadata.PackageNotFoundError:
                continue
            found[name] = version if distribution == name else f'{version} ({distribution})'
    found['cuda'] = torch.version.cuda or torch.version.hip
    return found


def _accelerator() -> str:
    if torch.cuda.is_available():
        return 'cuda'
    for name in ('xpu', 'mps'):
        module = getattr(torch, name, None) or getattr(torch.backends, name, None)
        if module is not None and module.is_available():
            return name
    return 'cpu'


def _agreement(device: torch.device, dtypes: Sequence[str]) -> Iterator[dict[str, Any]]:
    from mmgate.ops.measure import disagreement

    for op, backends, problems in _operators():
        reference = next(backend for backend in backends if backend.name == 'torch')
        for dtype in dtypes:
            for variant, arguments in _variants(op, torch.device('cpu'), DTYPES[dtype]):
                for backend in backends:
                    if backend.why_not(arguments[0].to(device)) is None:
                        reason = disagreement(backend, reference, problems.small(*arguments), device, True)
                        yield dict(op=op, backend=backend.name, dtype=dtype, variant=variant, disagrees=reason)


def _variants(op: str, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield arguments of every variant's usual widths: 32 channels a head."""
    if op == 'ms_deform_attn':
        for name, columns, gated in (('plain', 0, False), ('gated, points', 2, True), ('gated, boxes', 4, True)):
            yield name, _sampler(SMALL_LEVELS, 5, columns, gated, device, dtype)
    else:
        for name, bias in (('plain', None), ('padding mask', (2, 1, 1, 100)), ('full bias', (1, 1, 70, 100))):
            yield name, _plug(70, 100, bias, device, dtype)


def _sampler(
    levels: list[tuple[int, int]],
    queries: int | None,
    columns: int,
    gated: bool,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(0)

    def leaf(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(shape, generator=generator)).to(device, dtype).requires_grad_()

    shapes = torch.tensor(levels)
    areas = shapes.prod(1)
    tokens = int(areas.sum())
    samples = (2, queries or tokens, 8, len(levels), 4)
    reference = None
    if columns:  # in float32, as layers have them
        reference = torch.rand(2, samples[1], len(levels), columns, generator=generator).to(device)
    return (
        leaf(2, tokens, 8, 32),
        shapes.to(device),
        (areas.cumsum(0) - areas).to(device),
        leaf(*samples, 2, scale=2.0 if columns else 1.0),
        leaf(*samples),
        leaf(*samples[:4], 1, scale=0.3) if gated else None,
        True,
        'pre_softmax',
        reference,
    )


def _plug(
    rows: int, columns: int, bias: tuple[int, ...] | None, device: torch.device, dtype: torch.dtype
) -> tuple[Any, ...]:
    from mmgate.layers import GatingModulation

    generator = torch.Generator().manual_seed(0)
    shapes = (2, 8, rows, 32), (2, 8, columns, 32), (2, 8, columns, 32), (2, 1, rows, 32), (2, 1, columns, 32)
    tensors = [torch.randn(shape, generator=generator).to(device, dtype).requires_grad_() for shape in shapes]
    gml = GatingModulation('product', activation='tanh', init='paper').to(device)
    added = None if bias is None else torch.randn(bias, generator=generator).to(device)
    return (*tensors, gml, added, True, 'pre_softmax', 0.0)


def _times(device: torch.device, dtypes: Sequence[str], small: bool) -> Iterator[dict[str, Any]]:
    from mmgate.ops.measure import measure

    for op, backends, problems in _operators():
        for dtype in dtypes:
            for name, build in _shapes(op, small):
                arguments = build(device, DTYPES[dtype])
                usable = [backend for backend in backends if backend.why_not(arguments[0]) is None]
                for grad in (False, True):
                    found = measure(backends, usable, problems, arguments, device, grad)
                    mode = 'forward+backward' if grad else 'forward'
                    milliseconds = {key: round(1e3 * t, 4) for key, t in found.seconds.items()}
                    yield dict(op=op, dtype=dtype, shape=name, mode=mode, ms=milliseconds, out=found.out)


def _shapes(op: str, small: bool) -> Iterator[tuple[str, Callable[[torch.device, torch.dtype], tuple[Any, ...]]]]:
    if op == 'ms_deform_attn':
        levels = SMALL_LEVELS if small else LEVELS
        for name, (queries, columns) in SAMPLERS.items():
            count = 7 if small and queries else queries
            yield name, lambda d, t, n=count, c=columns: _sampler(levels, n, c, True, d, t)  # type: ignore[misc]
    else:
        for tokens in SMALL_TOKENS if small else TOKENS:
            yield f'N {tokens}', lambda d, t, n=tokens: _plug(n, n, None, d, t)  # type: ignore[misc]


def page(report: dict[str, Any]) -> str:
    """Return the findings as text."""
    versions = ', '.join(f'{name} {version or "-"}' for name, version in report['packages'].items())
    lines = [f'python {report["python"]}, {versions}', report['device'], '', 'Backends']
    lines += [f'  {x["op"]:16} {x["backend"]:12} {x["why_not"] or "can run"}' for x in report['backends']]
    lines += ['', 'Agreement with the float64 reference, output and every gradient']
    for x in report['agreement']:
        verdict = x['disagrees'] or 'agrees'
        lines.append(f'  {x["op"]:16} {x["backend"]:12} {x["dtype"]:9} {x["variant"]:14} {verdict}')
    if report['times']:
        lines += ['', 'Milliseconds, batch 2, 8 heads of 32 channels; the fastest first']
    for x in report['times']:
        times = ', '.join(f'{name} {t:.4g}' for name, t in sorted(x['ms'].items(), key=lambda pair: pair[1]))
        out = ''.join(f'; {name}: {reason}' for name, reason in x['out'].items())
        lines.append(f'  {x["op"]:16} {x["dtype"]:9} {x["shape"]:24} {x["mode"]:17} {times}{out}')
    return '\n'.join(lines)


if __name__ == '__main__':
    sys.exit(main())
