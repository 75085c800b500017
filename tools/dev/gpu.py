"""Run all measurements on a GPU: ``python tools/dev/gpu.py --out DIR`` or ``make gpu``.

There are three parts of at most eight minutes, each a separate command with ``--part``: ``correctness`` (tests and
compute-sanitizer), ``sampler`` (deformable attention beside its peers) and ``plug`` (PLuG attention, the doctor,
training steps). A step is a process with a time limit, and the page at the end lists how each ended. The command needs
torch, triton, numpy and pytest; a step that needs more reports it. If mmgate is not installed, set ``PYTHONPATH=.``.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch

from mmgate._environment import why_not
from mmgate.benchmarks.measure import describe_machine

ROOT = Path(__file__).resolve().parents[2]
KERNEL_TESTS = {
    'ms_deform_attn': (
        'tests/test_ops/test_deformable/test_triton_deformable.py',
        'tests/test_ops/test_deformable/test_deformable.py',
    ),
    'plug_attention': ('tests/test_ops/test_dense/test_triton_dense.py',),
}
CONFIGS = (  # a vanilla config, ours beside it, and the images' size
    (
        'mmdet::deformable_detr/deformable-detr-refine_r50_16xb2-50e_coco.py',
        'configs/plug/deformable_detr/plug-deformable-detr-refine_r50_8xb4-50e_coco.py',
        ('800', '1333'),
    ),
    (
        'mmdet::mask2former/mask2former_r50_8xb2-lsj-50e_coco.py',
        'configs/plug/mask2former/plug-mask2former_r50_8xb2-lsj-50e_coco.py',
        ('1024', '1024'),  # to which it pads images, so that larger ones fail
    ),
    (
        'configs/vanilla/mask_rcnn/mask-rcnn_pvt-demo_1xb8-8e_shapes.py',
        'configs/agent/mask_rcnn/agent-mask-rcnn_pvt-demo_1xb8-8e_shapes.py',
        ('800', '1333'),
    ),
)
SANITIZERS = ('memcheck', 'racecheck', 'initcheck')
SANITIZER = shutil.which('compute-sanitizer') or shutil.which('/usr/local/cuda/bin/compute-sanitizer')
# compute-sanitizer watches our kernels alone, as torch's many would take most of the time. initcheck has to watch all:
# it takes for uninitialized what a kernel has written that it does not watch.
KERNELS = ('order_kernel', 'forward_kernel', 'backward_kernel')
WATCHED = [part for name in KERNELS for part in ('--kernel-name', f'kernel_substring={name}')]
PYTEST = ['-m', 'pytest', '-q', '-p', 'no:cacheprovider', '-m', 'gpu']
# Most of the time of tests is spent on compiling kernels, which processes do beside each other.
BESIDE = ['--maxfail=20', *(['-n', '8'] if importlib.util.find_spec('xdist') else [])]


def sanitized(tool: str) -> list[str]:
    """Return the arguments of compute-sanitizer for a small test of each operator."""
    files = [path for paths in KERNEL_TESTS.values() for path in paths]
    test = [sys.executable, *PYTEST, '-x', '-k', 'equals_the_reference and (default or shared)', *files]
    return ['--tool', tool, '--error-exitcode', '9', *(WATCHED if tool != 'initcheck' else []), *test]


def operator(op: str, repetitions: str) -> list[str]:
    """Return the arguments of Python that measure an operator beside its peers."""
    options = ['--op', op, '--device', 'cuda', '--repetitions', repetitions]
    return ['tools/analysis_tools/benchmark_ops.py', *options, '--out', f'OUT/{op}.csv']


def training(peer: str, ours: str, size: tuple[str, str]) -> list[str]:
    """Return the arguments of Python that measure training steps of a vanilla config and of ours."""
    options = ['--peer', peer, '--ours', ours, '--size', *size, '--repetitions', '10']
    return ['tools/analysis_tools/benchmark_training.py', *options, '--out', f'OUT/{Path(ours).stem}.csv']


# By part: the seconds of each step, and its arguments, in which OUT is the folder of results.
PARTS: dict[str, dict[str, tuple[int, list[str]]]] = {
    'correctness': {
        'sampler-tests': (150, [*PYTEST, *BESIDE, *KERNEL_TESTS['ms_deform_attn']]),
        'plug-tests': (150, [*PYTEST, *BESIDE, *KERNEL_TESTS['plug_attention']]),
        **{tool: (55, sanitized(tool)) for tool in SANITIZERS},
    },
    'sampler': {'sampler': (450, operator('ms_deform_attn', '20'))},
    'plug': {
        'plug': (120, operator('plug_attention', '10')),
        'doctor': (110, ['-m', 'mmgate.doctor', '--device', 'cuda', '--time', '--dtype', 'float32', 'bfloat16']),
        **{f'training-{number}': (60, training(*configs)) for number, configs in enumerate(CONFIGS, 1)},
    },
}


def run(step: str, arguments: list[str], limit: int, out: Path) -> str:
    """Run a step with its output in a log and return a description of its end."""
    log = out / f'{step}.log'
    # Training alone needs and imports the mm packages.
    trains = step.startswith('training')
    missing = (why_not('mmengine') or why_not('mmdet')) if trains else None
    if step in SANITIZERS and SANITIZER is None:
        missing = 'compute-sanitizer was not found'
    if missing:
        return f'could not run: {missing}'
    environment = os.environ | {'MMGATE_TORCH_ALONE': str(int(not trains))}
    environment['PYTHONPATH'] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get('PYTHONPATH'))))
    if step in SANITIZERS:  # which see single tensors only if torch does not cache memory
        environment['PYTORCH_NO_CUDA_MEMORY_CACHING'] = '1'
    program = SANITIZER if step in SANITIZERS else sys.executable
    command = [str(program), *(word.replace('OUT/', f'{out}/') for word in arguments)]
    with log.open('w') as file:
        try:
            done = subprocess.run(command, stdout=file, stderr=file, timeout=limit, env=environment, cwd=ROOT)
        except subprocess.TimeoutExpired:
            return f'failed: not done after {limit} s, see {log.name}'
    return 'done' if done.returncode == 0 else f'failed with {done.returncode}, see {log.name}'


def page(where: str, told: list[tuple[str, str, float]], out: Path) -> str:
    """Return the steps' ends, the doctor's words and the rows of all CSV files in a folder as Markdown."""
    lines = [f'# {where}', '', '| step | how it ended | seconds |', '|---|---|---|']
    lines += [f'| {step} | {words} | {seconds:.0f} |' for step, words, seconds in told]
    log = out / 'doctor.log'
    if log.exists():
        lines += ['', '## Backends', '', '```', log.read_text().strip(), '```']
    lines += ['', '## Times and memory', '', '| operator | input | mode | provider | metric | median | peer / ours |']
    lines += ['|---|---|---|---|---|---|---|']
    for path in sorted(out.glob('*.csv')):
        for row in csv.DictReader(path.read_text().splitlines()):
            keys = ' | '.join(row[key] for key in ('op', 'x', 'mode', 'provider', 'metric'))
            lines.append(f'| {keys} | {row["y_50"]} {row["unit"]} | {row["ratio_to_peer"]} |')
    return '\n'.join([*lines, ''])


def main(argv: list[str]) -> int:
    """Run all parts, or one, and return the exit status: 1 if a step failed."""
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('--out', type=Path, default=Path('benchmarks/results'), help='folder of a folder for the GPU')
    parser.add_argument('--part', choices=list(PARTS), help='eight minutes at most; default: all')
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error('torch sees no CUDA device')
    out = (args.out / torch.cuda.get_device_name().replace(' ', '-')).resolve()
    out.mkdir(parents=True, exist_ok=True)
    told: list[tuple[str, str, float]] = []
    for part in [args.part] if args.part else PARTS:
        for step, (limit, arguments) in PARTS[part].items():
            start = time.perf_counter()
            words = run(step, arguments, limit, out)
            told.append((step, words, time.perf_counter() - start))
            print(f'{step}: {words} ({told[-1][2]:.0f} s)', flush=True)
    written = out / f'{args.part or "all"}.md'
    written.write_text(page(describe_machine(torch.device('cuda')), told, out))
    print(written.read_text(), f'written to {written}', sep='\n')
    return int(any(words.startswith('failed') for _, words, _ in told))


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
