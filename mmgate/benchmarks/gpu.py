"""All that there is to measure on a GPU, in one command: ``python -m mmgate.benchmarks.gpu --out DIR`` or ``make gpu``.

Tests of the kernels, compute-sanitizer, calibration, the operators beside their peers, the kernels' switches, training
steps: each step is a process with a time limit, results are written as they come, and the table at the end says what
could not run. It needs torch, triton, numpy and pytest; what needs more says so. ``--device cpu --tiny`` tries it
without a GPU.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmgate.ops import ms_deform_attn
from mmgate.ops.backend import machine

from . import ops_cuda
from .ops import Row, interleaved
from .switches import plug_switches, sampler_switches

ROOT = Path(__file__).parents[2]
OPS = ('ms_deform_attn', 'plug_attention')
SMALL_TESTS = 'equals_the_reference and (default or shared)'
CONFIGS = (  # a vanilla config, and ours beside it
    (
        'configs/vanilla/deformable_detr/deformable-detr-refine_r50_8xb4-50e_coco.py',
        'configs/plug/deformable_detr/plug-deformable-detr-refine_r50_8xb4-50e_coco.py',
    ),
    (
        'mmdet::mask2former/mask2former_r50_8xb2-lsj-50e_coco.py',
        'configs/plug/mask2former/plug-mask2former_r50_8xb2-lsj-50e_coco.py',
    ),
    (
        'configs/vanilla/mask_rcnn/mask-rcnn_pvt-demo_1xb8-8e_shapes.py',
        'configs/agent/mask_rcnn/agent-mask-rcnn_pvt-demo_1xb8-8e_shapes.py',
    ),
)
TINY: dict[str, Any] = dict(levels=[(2, 2)], batch=1, heads=1, points=1)
TRIAL = 6  # times as long as on a GPU may a step of a trial take, on a machine that does other things beside


def main(argv: Sequence[str] | None = None) -> int:
    """Run all steps, or one, and return the exit status: 1 if a step failed."""
    parser = argparse.ArgumentParser(prog='python -m mmgate.benchmarks.gpu', description=__doc__.split('\n')[0])
    parser.add_argument('--out', type=Path, default=Path('benchmarks/results'), help='folder of the CSV and the table')
    parser.add_argument('--device', default='cuda')
    parser.add_argument('--tiny', action='store_true', help='sizes that a CPU and an interpreter take in a minute')
    parser.add_argument('--steps', nargs='+', choices=list(STEPS), help='default: all')
    parser.add_argument('--step', choices=list(ROWS), help=argparse.SUPPRESS)  # in a process of its own
    args = parser.parse_args(argv)
    if args.device == 'cuda' and not torch.cuda.is_available():
        parser.error('torch sees no CUDA device; --device cpu --tiny tries the command without one')
    if args.step:
        _write_rows(ROWS[args.step](args.device, args.tiny), args.out)
        return 0
    if args.device == 'cpu':
        os.environ.setdefault('TRITON_INTERPRET', '1')  # in which alone the kernels run there
    device = torch.device(args.device)
    name = torch.cuda.get_device_name(device) if device.type == 'cuda' else 'CPU'
    args.out.mkdir(parents=True, exist_ok=True)
    csv_file = args.out / f'{name.replace(" ", "-")}.csv'
    csv_file.unlink(missing_ok=True)
    told: list[tuple[str, str, float]] = []
    for step in args.steps or STEPS:
        limit, command = STEPS[step]
        start = time.perf_counter()
        limit *= TRIAL if args.tiny else 1
        words = _run(command(args, csv_file), limit, csv_file.with_suffix(f'.{step}.log'), 'training' not in step)
        told.append((step, words, time.perf_counter() - start))
        print(f'{step}: {words} ({told[-1][2]:.0f} s)', flush=True)
        csv_file.with_suffix('.md').write_text(_page(machine(device), told, csv_file))
    print(csv_file.with_suffix('.md').read_text())
    print(f'written to {csv_file} and {csv_file.with_suffix(".md")}')
    return int(any(words.startswith('failed') for _, words, _ in told))


def _run(command: list[str] | str, limit: int, log: Path, alone: bool) -> str:
    """Run a command, write what it says to ``log``, and return in words how it ended; words are why it cannot run.

    What needs operators ``alone`` is spared the import of the mm packages.
    """
    if isinstance(command, str):
        return f'could not run: {command}'
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get('PYTHONPATH'))))
    environment = os.environ | {'PYTHONPATH': paths, 'MMGATE_TORCH_ALONE': str(int(alone))}
    with log.open('w') as file:
        try:
            done = subprocess.run(command, stdout=file, stderr=file, timeout=limit, env=environment, cwd=ROOT)
        except subprocess.TimeoutExpired:
            return f'failed: not done after {limit} s, see {log.name}'
    if command[1:3] == ['-m', 'pytest'] and done.returncode == 5:
        return 'could not run: no test here is for this device'
    return 'done' if done.returncode == 0 else f'failed with {done.returncode}, see {log.name}'


def _python(*arguments: str) -> list[str]:
    return [sys.executable, *arguments]


def _tests(op: str, args: argparse.Namespace, _: Path) -> list[str] | str:
    path = f'tests/test_ops/test_{op}_triton.py'
    if not (ROOT / path).is_file():
        return 'the tests are in the checkout, which this is not'
    marks = ['-m', 'gpu'] if args.device == 'cuda' else ['-k', f'interpreter and {SMALL_TESTS}']
    return _python('-m', 'pytest', '-q', '-x', '-p', 'no:cacheprovider', *marks, path)


def _sanitizer(tool: str, args: argparse.Namespace, csv_file: Path) -> list[str] | str:
    program = shutil.which('compute-sanitizer') or shutil.which('/usr/local/cuda/bin/compute-sanitizer')
    if program is None or args.device != 'cuda':
        return 'compute-sanitizer was not found' if program is None else 'it is for CUDA'
    tests = [_tests(op, args, csv_file) for op in OPS]
    if isinstance(tests[0], str):
        return tests[0]
    return [program, '--tool', tool, '--error-exitcode', '9', *tests[0], tests[1][-1], '-k', SMALL_TESTS]


def _calibrate(args: argparse.Namespace, _: Path) -> list[str]:
    options = ['--sizes', 'tiny'] if args.tiny else ['--dtype', 'float32', 'bfloat16']
    return _python('-m', 'mmgate.doctor', '--calibrate', '--device', args.device, '--limit', '30', *options)


def _measure(step: str, args: argparse.Namespace, csv_file: Path) -> list[str]:
    tiny = ['--tiny'] if args.tiny else []
    return _python(
        '-m', 'mmgate.benchmarks.gpu', '--step', step, '--device', args.device, '--out', str(csv_file.resolve()), *tiny
    )


def _train(peer: str, ours: str, args: argparse.Namespace, csv_file: Path) -> list[str] | str:
    from mmgate._environment import why_not

    missing = why_not('mmengine') or why_not('mmdet')
    if missing or not (ROOT / ours).is_file():
        return missing or f'{ours} is in the checkout, which this is not'
    small = ['--size', '64', '96', '--batch', '1', '--repetitions', '1'] if args.tiny else ['--repetitions', '5']
    out = csv_file.with_suffix(f'.{Path(ours).stem}.csv').resolve()
    tool = 'tools/analysis_tools/benchmark_training.py'
    return _python(tool, '--peer', peer, '--ours', ours, '--device', args.device, '--out', str(out), *small)


def sampler_rows(device: str, tiny: bool) -> Iterator[Row]:
    """Yield the sampler beside its peers, in float32 and bfloat16, of an encoder and two decoders."""
    if tiny:
        queries: dict[str, tuple[int | None, int]] = {'encoder': (None, 2), 'decoder': (3, 4)}
        return ops_cuda.benchmark_ms_deform_attn(1, device=device, queries=queries, **TINY)
    return ops_cuda.benchmark_ms_deform_attn(device=device)


def plug_rows(device: str, tiny: bool) -> Iterator[Row]:
    """Yield dense PLuG beside the eager form, FlexAttention over a gate formed before, and ungated fused attention."""
    cases = [(4096, torch.bfloat16), (4096, torch.float32), (1024, torch.bfloat16), (16384, torch.bfloat16)]
    for tokens, dtype in [(16, torch.float32)] if tiny else cases:  # what matters most comes before time is up
        options: dict[str, Any] = dict(device=device, tokens=[tokens], dtype=dtype)
        for row in ops_cuda.benchmark_plug_attention(1 if tiny else 10, **options):
            yield replace(row, x=f'{row.x} {dtype}'.replace('torch.', ''))


def switch_rows(op: str, device: str, tiny: bool) -> Iterator[Row]:
    """Yield an operator's kernels launched otherwise, beside the usual launch."""
    if op == OPS[0]:
        return sampler_switches(device, repetitions=1, **TINY) if tiny else sampler_switches(device)
    return plug_switches(device, 16, 2, torch.float32, repetitions=1) if tiny else plug_switches(device)


class _Encoder(nn.Module):
    """Layers of a deformable encoder by torch alone, with the gate of PLuG or without."""

    def __init__(self, layers: int, width: int, levels: int, gated: bool) -> None:
        super().__init__()
        count = width // 32 * levels * 4  # sampling points of a query
        sizes = dict(value=width, offsets=2 * count, logits=count, out=width, **({'gate': count} if gated else {}))
        self.layers = nn.ModuleList(
            nn.ModuleDict({name: nn.Linear(width, size) for name, size in sizes.items()}) for _ in range(layers)
        )

    def forward(self, x: Tensor, shapes: Tensor, starts: Tensor, reference: Tensor, backend: str) -> Tensor:
        batch, tokens, width = x.shape
        axes = (batch, tokens, width // 32, len(shapes), 4)
        layer: Any
        for layer in self.layers:
            parts = {name: linear(x) for name, linear in layer.items() if name != 'out'}
            gate = parts['gate'].view(axes).tanh() if 'gate' in parts else None
            value, offsets = parts['value'].view(*axes[:3], 32), parts['offsets'].view(*axes, 2)
            inputs = (value, shapes, starts, offsets, parts['logits'].view(axes), gate)
            x = x + layer['out'](ms_deform_attn(*inputs, reference_points=reference, backend=backend))
        return x


def step_rows(device: str, tiny: bool) -> Iterator[Row]:
    """Yield training steps (AdamW) of a deformable encoder's layers, ungated by grid_sample and gated by others."""
    levels, width, layers = (TINY['levels'], 32, 1) if tiny else (ops_cuda.LEVELS, 256, 6)
    (_, shapes, starts, *_), reference = ops_cuda.sampler_inputs(levels, 2, None, 2, device, heads=2)
    x = torch.randn(2, reference.shape[1], width, device=device)
    runs = {}
    for name, gated, backend in (
        ('ungated, grid_sample', False, 'grid_sample'),
        *((f'gated, {backend}', True, backend) for backend in ('auto', 'grid_sample', 'triton')),
    ):
        model = _Encoder(layers, width, len(levels), gated).to(device)
        optimizer = torch.optim.AdamW(model.parameters())

        def step(x: Tensor, model: nn.Module = model, optimizer: Any = optimizer, backend: str = backend) -> Tensor:
            optimizer.zero_grad()
            loss = model(x, shapes, starts, reference, backend).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        runs[name] = step
    yield from interleaved('training', runs, f'{layers} layers', [x], 'step', 1 if tiny else 10)


ROWS: dict[str, Callable[[str, bool], Iterator[Row]]] = {
    'sampler': sampler_rows,
    'plug': plug_rows,
    'sampler-switches': partial(switch_rows, OPS[0]),
    'plug-switches': partial(switch_rows, OPS[1]),
    'step': step_rows,
}
STEPS: dict[str, tuple[int, Any]] = {  # seconds, and what makes the command
    'sampler-tests': (65, partial(_tests, OPS[0])),
    'plug-tests': (40, partial(_tests, OPS[1])),
    **{tool: (25, partial(_sanitizer, tool)) for tool in ('memcheck', 'racecheck')},
    'calibration': (72, _calibrate),
    **{step: (limit, partial(_measure, step)) for step, limit in zip(ROWS, (40, 60, 33, 33, 15), strict=True)},
    **{f'training-{i}': (22, partial(_train, *configs)) for i, configs in enumerate(CONFIGS, 1)},
}  # 474 seconds at most


def _write_rows(rows: Iterator[Row], path: Path) -> None:
    """Append rows as they come."""
    for row in rows:
        new = not path.exists()
        with path.open('a', newline='') as file:
            writer = csv.DictWriter(file, [field.name for field in fields(Row)])
            if new:
                writer.writeheader()
            writer.writerow(asdict(row))


def _page(where: str, told: list[tuple[str, str, float]], csv_file: Path) -> str:
    lines = [f'# {where}', '', '| step | how it ended | seconds |', '|---|---|---|']
    lines += [f'| {step} | {words} | {seconds:.0f} |' for step, words, seconds in told]
    calibration = csv_file.with_suffix('.calibration.log')
    if calibration.exists():
        lines += ['', '## Calibration', '', '```', calibration.read_text().strip(), '```']
    lines += ['', '## Times and memory', '', '| operator | input | mode | provider | metric | median | peer / ours |']
    lines += ['|---|---|---|---|---|---|---|']
    for path in [csv_file, *sorted(csv_file.parent.glob(f'{csv_file.stem}.*.csv'))]:
        with path.open() if path.exists() else open(os.devnull) as file:
            for row in islice(csv.DictReader(file), 10_000):
                keys = ('op', 'x', 'mode', 'provider', 'metric')
                figures = f'{row["y_50"]} {row["unit"]} | {row["ratio_to_peer"]}'
                lines.append(f'| {" | ".join(row[key] for key in keys)} | {figures} |')
    missing = [f'- {step}: {words}' for step, words, _ in told if words != 'done']
    for step, _, _ in told:
        log = csv_file.with_suffix(f'.{step}.log')
        left_out = re.findall(r'UserWarning: (.* is left out, .*)', log.read_text()) if log.exists() else []
        missing += [f'- {step}: {line}' for line in dict.fromkeys(left_out)]
    return '\n'.join([*lines, '', '## What did not run, or failed', '', *(missing or ['nothing']), ''])


if __name__ == '__main__':
    sys.exit(main())
