"""Run all measurements on a GPU: ``python tools/dev/gpu.py --out DIR`` or ``make gpu``.

There are three parts of at most eight minutes, each a separate command with ``--part``: ``correctness`` (tests and
compute-sanitizer), ``sampler`` (deformable attention beside its peers, an encoder first) and ``plug`` (PLuG attention,
the doctor, training steps). A step is a process with a time limit. Rows are written as they come, later parts append,
and the table at the end lists the steps that could not run. The command needs torch, triton, numpy and pytest; a step
that needs more reports it. If mmgate is not installed, set ``PYTHONPATH=.``. ``--device cpu --tiny`` tries it without a
GPU.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from mmgate._environment import why_not
from mmgate.benchmarks import ops
from mmgate.benchmarks.measure import MODES, Row, describe_machine, interleaved, write_csv
from mmgate.gates import MultiScaleDeformableAttention, PLuGMultiScaleDeformableAttention
from mmgate.gates.gml import GatingModulation
from mmgate.ops import plug_attention
from mmgate.ops.dense import chunked

ROOT = Path(__file__).resolve().parents[2]
KERNEL_TESTS = {
    'ms_deform_attn': 'tests/test_ops/test_deformable/test_triton_deformable.py',
    'plug_attention': 'tests/test_ops/test_dense/test_triton_dense.py',
}
OPS = tuple(KERNEL_TESTS)
SMALL_TESTS = 'equals_the_reference and (default or shared)'
CONFIGS = (  # a vanilla config, ours beside it, and the images' size
    (
        'mmdet::deformable_detr/deformable-detr-refine_r50_16xb2-50e_coco.py',
        'configs/plug/deformable_detr/plug-deformable-detr-refine_r50_8xb4-50e_coco.py',
        (800, 1333),
    ),
    (
        'mmdet::mask2former/mask2former_r50_8xb2-lsj-50e_coco.py',
        'configs/plug/mask2former/plug-mask2former_r50_8xb2-lsj-50e_coco.py',
        (1024, 1024),  # to which it pads images, so that larger ones fail
    ),
    (
        'configs/vanilla/mask_rcnn/mask-rcnn_pvt-demo_1xb8-8e_shapes.py',
        'configs/agent/mask_rcnn/agent-mask-rcnn_pvt-demo_1xb8-8e_shapes.py',
        (800, 1333),
    ),
)
TINY: dict[str, Any] = dict(levels=[(2, 2)], batch=1, heads=1, points=1)
TRIAL = 6  # factor of the limits in a trial, on a machine that does other things beside
CHUNKS = (1 << 21, 1 << 24, 1 << 26)  # elements of PLuG's map that exist at a time
# compute-sanitizer watches our kernels alone, as torch's many would take most of the time. initcheck has to watch all:
# it takes for uninitialized what a kernel has written that it does not watch.
KERNELS = ('order_kernel', 'forward_kernel', 'backward_kernel')


def main(argv: Sequence[str] | None = None) -> int:
    """Run all steps, or one, and return the exit status: 1 if a step failed."""
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('--out', type=Path, default=Path('benchmarks/results'), help='folder of the CSV and the table')
    parser.add_argument('--device', default='cuda')
    parser.add_argument('--tiny', action='store_true', help='sizes that a CPU and an interpreter take in a minute')
    parser.add_argument('--part', choices=list(PARTS), help='eight minutes at most; default: all')
    parser.add_argument('--steps', nargs='+', choices=list(STEPS), help='default: all of the part')
    parser.add_argument('--step', choices=list(ROWS), help=argparse.SUPPRESS)  # in a separate process
    args = parser.parse_args(argv)
    if args.device == 'cuda' and not torch.cuda.is_available():
        parser.error('torch sees no CUDA device; --device cpu --tiny tries the command without one')
    if args.step:
        write_csv(ROWS[args.step](args.device, args.tiny), args.out, append=True)
        return 0
    if args.device == 'cpu':
        os.environ.setdefault('TRITON_INTERPRET', '1')  # without a GPU the kernels run only in it
    device = torch.device(args.device)
    name = torch.cuda.get_device_name(device) if device.type == 'cuda' else 'CPU'
    args.out.mkdir(parents=True, exist_ok=True)
    csv_file = args.out / f'{name.replace(" ", "-")}.csv'
    if args.part is None and args.steps is None:
        csv_file.unlink(missing_ok=True)
    told: list[tuple[str, str, float]] = []
    for step in args.steps or PARTS.get(args.part, list(STEPS)):
        limit, command = STEPS[step]
        start = time.perf_counter()
        limit *= TRIAL if args.tiny else 1
        words = _run(command(args, csv_file), limit, csv_file.with_suffix(f'.{step}.log'), step)
        told.append((step, words, time.perf_counter() - start))
        print(f'{step}: {words} ({told[-1][2]:.0f} s)', flush=True)
        page = csv_file.with_suffix(f'.{args.part}.md' if args.part else '.md')
        page.write_text(_page(describe_machine(device), told, csv_file))
    print(page.read_text())
    print(f'written to {csv_file} and {page}')
    return int(any(words.startswith('failed') for _, words, _ in told))


def _run(command: list[str] | str, limit: int, log: Path, step: str) -> str:
    """Run a step's command with its output in ``log`` and return a description of its end.

    Training alone needs and imports the mm packages. memcheck sees single tensors only if torch does not cache memory.
    """
    if isinstance(command, str):
        return f'could not run: {command}'
    environment = dict(os.environ)
    environment['PYTHONPATH'] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get('PYTHONPATH'))))
    environment['MMGATE_TORCH_ALONE'] = '0' if 'training' in step else '1'
    if step in SANITIZERS:
        environment['PYTORCH_NO_CUDA_MEMORY_CACHING'] = '1'
    with log.open('w') as file:
        try:
            done = subprocess.run(command, stdout=file, stderr=file, timeout=limit, env=environment, cwd=ROOT)
        except subprocess.TimeoutExpired:
            return f'failed: not done after {limit} s, see {log.name}'
    if command[1:3] == ['-m', 'pytest'] and done.returncode == 5:
        return 'could not run: no test here is for this device'
    return 'done' if done.returncode == 0 else f'failed with {done.returncode}, see {log.name}'


def _tests(op: str, args: argparse.Namespace, _: Path) -> list[str]:
    path = KERNEL_TESTS[op]
    options = ['-q', '--maxfail=20', '-p', 'no:cacheprovider']
    if args.device == 'cuda':
        marks = ['-m', 'gpu']
        # Most of the time is spent on compiling kernels, which processes do beside each other.
        if importlib.util.find_spec('xdist') is not None:
            options += ['-n', '8']
    else:
        marks = ['-k', f'interpreter and {SMALL_TESTS}']
    return [sys.executable, '-m', 'pytest', *options, *marks, path]


def _sanitizer(tool: str, args: argparse.Namespace, csv_file: Path) -> list[str] | str:
    program = shutil.which('compute-sanitizer') or shutil.which('/usr/local/cuda/bin/compute-sanitizer')
    if program is None or args.device != 'cuda':
        return 'compute-sanitizer was not found' if program is None else 'it is for CUDA'
    filters = [part for name in KERNELS for part in ('--kernel-name', f'kernel_substring={name}')]
    tests = [sys.executable, '-m', 'pytest', '-q', '-x', '-p', 'no:cacheprovider', '-m', 'gpu', '-k', SMALL_TESTS]
    watched = [] if tool == 'initcheck' else filters
    return [program, '--tool', tool, '--error-exitcode', '9', *watched, *tests, *KERNEL_TESTS.values()]


def _doctor(args: argparse.Namespace, _: Path) -> list[str]:
    options = [] if args.tiny else ['--time', '--dtype', 'float32', 'bfloat16']
    return [sys.executable, '-m', 'mmgate.doctor', '--device', args.device, *options]


def _measure(command: list[str], args: argparse.Namespace, csv_file: Path) -> list[str]:
    """Return the command of a step that appends to the CSV."""
    options = ['--device', args.device, '--out', str(csv_file.resolve()), *(['--tiny'] if args.tiny else [])]
    return [sys.executable, *command, *options]


def _train(peer: str, ours: str, size: tuple[int, int], args: argparse.Namespace, csv_file: Path) -> list[str] | str:
    missing = why_not('mmengine') or why_not('mmdet')
    full = ['--size', *map(str, size), '--repetitions', '10']
    sizes = ['--size', '64', '96', '--batch', '1', '--repetitions', '1'] if args.tiny else full
    out = csv_file.with_suffix(f'.{Path(ours).stem}.csv').resolve()
    options = ['--peer', peer, '--ours', ours, '--device', args.device, '--out', str(out), *sizes]
    return missing or [sys.executable, 'tools/analysis_tools/benchmark_training.py', *options]


def sampler_rows(device: str, tiny: bool) -> Iterator[Row]:
    """Yield rows of the sampler and its peers, in float32 and bfloat16, for an encoder and two decoders."""
    small: dict[str, Any] = dict(repetitions=1, queries={'encoder': (None, 2), 'decoder': (3, 4)}, **TINY)
    return ops.benchmark_ms_deform_attn(device=device, **(small if tiny else {}))


def plug_rows(device: str, tiny: bool) -> Iterator[Row]:
    """Yield rows of dense PLuG, its eager form, FlexAttention with a precomputed gate, and ungated fused attention."""
    cases = [(4096, torch.bfloat16), (4096, torch.float32), (1024, torch.bfloat16), (16384, torch.bfloat16)]
    for tokens, dtype in [(16, torch.float32)] if tiny else cases:  # the most important cases come first
        yield from ops.benchmark_plug_attention(1 if tiny else 10, device=device, tokens=[tokens], dtype=dtype)


def chunk_rows(device: str, tiny: bool) -> Iterator[Row]:
    """Yield rows of the backend 'chunked' with several sizes of its chunks."""
    tokens = 16 if tiny else 4096
    dtype = torch.float32 if tiny else torch.bfloat16
    gml = GatingModulation('product', activation='tanh', init='paper').to(device)
    inputs = [torch.randn(2, heads, tokens, 32, device=device, dtype=dtype) for heads in (8, 8, 8, 1, 1)]

    def attend(*tensors: Tensor) -> Tensor:
        return plug_attention(*tensors, gml, backend='chunked')

    def of_size(chunk: int) -> Callable[[], Any]:
        return lambda: mock.patch.object(chunked, 'chunk_on', lambda device: chunk)

    names = {f'chunks of 2^{chunk.bit_length() - 1}': chunk for chunk in CHUNKS}
    within = {name: of_size(chunk) for name, chunk in names.items()}
    for mode in MODES:
        runs = dict.fromkeys(names, attend)
        x = f'N{tokens} {str(dtype)[6:]}'
        yield from interleaved('plug_attention', runs, x, inputs, mode, 1 if tiny else 10, within)


def step_rows(device: str, tiny: bool) -> Iterator[Row]:
    """Yield rows of training steps (AdamW) of a deformable encoder, ungated with grid_sample and gated with others."""
    levels, width, count = (TINY['levels'], 32, 1) if tiny else (ops.LEVELS, 256, 6)
    (_, shapes, starts, *_), reference = ops.sampler_inputs(levels, 2, None, 2, device, heads=2)
    maps = dict(reference_points=reference, spatial_shapes=shapes, level_start_index=starts)
    gated = PLuGMultiScaleDeformableAttention
    ungated = MultiScaleDeformableAttention
    kinds = [('ungated', ungated, 'grid_sample'), *(('gated', gated, x) for x in ('auto', 'grid_sample', 'triton'))]
    x = torch.randn(2, reference.shape[1], width, device=device)
    runs = {}
    for name, kind, backend in kinds:
        options: dict[str, Any] = dict(num_levels=len(levels), batch_first=True, backend=backend)
        layers = nn.ModuleList(kind(width, width // 32, **options) for _ in range(count)).to(device)
        optimizer = AdamW(layers.parameters())

        def step(x: Tensor, layers: nn.ModuleList = layers, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            for layer in layers:
                x = layer(x, **maps)
            loss = x.square().mean()
            loss.backward()
            optimizer.step()
            return loss

        runs[f'{name}, {backend}'] = step
    yield from interleaved('training', runs, f'{count} layers', [x], 'step', 1 if tiny else 10)


ROWS: dict[str, Callable[[str, bool], Iterator[Row]]] = {
    'sampler': sampler_rows,
    'plug': plug_rows,
    'plug-chunks': chunk_rows,
    'step': step_rows,
}
OURS = ['tools/dev/gpu.py', '--step']
SWITCHES = ['tools/dev/kernels/switches.py']
SANITIZERS = ('memcheck', 'racecheck', 'initcheck')
STEPS: dict[str, tuple[int, Any]] = {  # seconds, and function that returns the command
    'sampler-tests': (150, partial(_tests, OPS[0])),
    'plug-tests': (150, partial(_tests, OPS[1])),
    **{tool: (55, partial(_sanitizer, tool)) for tool in SANITIZERS},
    'sampler': (330, partial(_measure, [*OURS, 'sampler'])),
    'sampler-switches': (120, partial(_measure, [*SWITCHES, OPS[0]])),
    'plug-chunks': (30, partial(_measure, [*OURS, 'plug-chunks'])),
    'plug': (90, partial(_measure, [*OURS, 'plug'])),
    'doctor': (110, _doctor),
    'step': (20, partial(_measure, [*OURS, 'step'])),
    'plug-switches': (40, partial(_measure, [*SWITCHES, OPS[1]])),
    **{f'training-{i}': (60, partial(_train, *configs)) for i, configs in enumerate(CONFIGS, 1)},
}
PARTS: dict[str, list[str]] = {  # 480 seconds at most, each
    'correctness': ['sampler-tests', 'plug-tests', *SANITIZERS],
    'sampler': ['sampler', 'sampler-switches'],
    'plug': ['plug-chunks', 'plug', 'doctor', 'step', 'plug-switches', 'training-1', 'training-2', 'training-3'],
}


def _page(where: str, told: list[tuple[str, str, float]], csv_file: Path) -> str:
    lines = [f'# {where}', '', '| step | how it ended | seconds |', '|---|---|---|']
    lines += [f'| {step} | {words} | {seconds:.0f} |' for step, words, seconds in told]
    doctor = csv_file.with_suffix('.doctor.log')
    if doctor.exists():
        lines += ['', '## Backends', '', '```', doctor.read_text().strip(), '```']
    lines += ['', '## Times and memory', '', '| operator | input | mode | provider | metric | median | peer / ours |']
    lines += ['|---|---|---|---|---|---|---|']
    for path in filter(Path.exists, [csv_file, *sorted(csv_file.parent.glob(f'{csv_file.stem}.*.csv'))]):
        for row in csv.DictReader(path.read_text().splitlines()):
            keys = ' | '.join(row[key] for key in ('op', 'x', 'mode', 'provider', 'metric'))
            lines.append(f'| {keys} | {row["y_50"]} {row["unit"]} | {row["ratio_to_peer"]} |')
    missing = [f'- {step}: {words}' for step, words, _ in told if words != 'done']
    for step, _, _ in told:
        log = csv_file.with_suffix(f'.{step}.log')
        left_out = re.findall(r'UserWarning: (.* is left out, .*)', log.read_text()) if log.exists() else []
        missing += [f'- {step}: {line}' for line in dict.fromkeys(left_out)]
    return '\n'.join([*lines, '', '## Steps that did not run, or failed', '', *(missing or ['nothing']), ''])


if __name__ == '__main__':
    sys.exit(main())
