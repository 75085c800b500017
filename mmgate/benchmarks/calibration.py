"""Which backend is right and fastest on this machine: each checked and timed on the same tensors, apart from others.

A backend runs in a process of its own, which may crash or hang without harm: then it is out. What it gives, output and
gradients, is compared with the float64 reference on the tensors that it is timed on, at an encoder's and a decoder's
sizes and, for PLuG, with and without a mask. ``python -m mmgate.doctor --calibrate`` prints and keeps the result.
"""

from __future__ import annotations

import faulthandler
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import mmgate.ops  # noqa: F401  (registers the backends)
from mmgate.layers.gml import GatingModulation
from mmgate.ops.backend import OPERATORS, SIZES, find, write
from mmgate.ops.ms_deform_attn import offset_locations

from .ops import MODES, measure
from .ops_cuda import LEVELS, sampler_inputs

DTYPES = {'float32': torch.float32, 'float16': torch.float16, 'bfloat16': torch.bfloat16}
TOLERANCE = {'float32': 5e-3, 'float16': 2e-2, 'bfloat16': 6e-2}  # of the largest number
MARGIN = 0.95  # of the time of the order's own, which another has to stay below
SECONDS, REPETITIONS = 1.0, 10  # of timing a mode
PIECES = 16  # in which the reference is formed, for memory's sake
MARGIN_OF_PIXELS = 0.1  # between a sample and the next pixel's centre, where gradients jump
# A sampler's queries (None: one for each token) and columns of reference points; PLuG's tokens, of which the small are
# padded and the others multiples of every block.
SHAPES: dict[tuple[str, str], dict[str, tuple[int | None, int]]] = {
    ('ms_deform_attn', 'full'): {'small': (300, 2), 'medium': (900, 4), 'large': (None, 2)},
    ('ms_deform_attn', 'tiny'): {'small': (5, 2), 'medium': (3, 4), 'large': (None, 2)},
    ('plug_attention', 'full'): {'small': (100, 1), 'medium': (1024, 0), 'large': (4096, 0)},
    ('plug_attention', 'tiny'): {'small': (21, 1), 'medium': (32, 0), 'large': (64, 0)},
}
TINY_LEVELS = [(2, 2), (1, 2)]  # few enough for Triton's interpreter
Arguments = tuple[Any, ...]


@dataclass
class Row:
    """What was found of a backend: milliseconds by mode, or why it is out."""

    op: str
    dtype: str
    size: str
    backend: str
    ms: dict[str, float] = field(default_factory=dict)
    out: str | None = None


def problem(op: str, size: str, dtype: str, scale: str, device: torch.device) -> Arguments:
    """Return the arguments of a backend's call, the same numbers on every device.

    Args:
        op: The operator.
        size: One of :data:`mmgate.ops.backend.SIZES`.
        dtype: One of :data:`DTYPES`.
        scale: ``'full'``, or ``'tiny'`` for a trial.
        device: Where the tensors are.
    """
    full, (count, kind) = scale == 'full', SHAPES[op, scale][size]
    batch, heads = (2, 8) if full else (1, 1 + (op == 'plug_attention'))  # which pairs heads
    if op == 'ms_deform_attn':
        sizes = dict(heads=heads, points=4 if full else 2)
        inputs, reference = sampler_inputs(LEVELS if full else TINY_LEVELS, batch, count, kind, 'cpu', **sizes)
        inputs[3] = _away_from_centres(inputs[3], reference, inputs[1])
        tensors = [x.to(device, DTYPES[dtype]).requires_grad_() if x.is_floating_point() else x for x in inputs]
        return (*(x.to(device) for x in tensors), True, 'pre_softmax', reference.to(device))
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(batch, h, count or 1, 32, generator=generator) for h in (heads, heads, heads, 1, 1)]
    bias = None
    if kind:  # the last fifth of the keys is padding
        bias = torch.zeros(batch, 1, 1, count or 1, device=device)
        bias[..., -(count or 1) // 5 :] = -torch.inf
    leaves = [x.to(device, DTYPES[dtype]).requires_grad_() for x in tensors]
    torch.manual_seed(0)
    gml = GatingModulation('product', activation='tanh', init='paper').to(device)
    return (*leaves, gml, bias, True, 'pre_softmax', 0.0)


def _away_from_centres(offsets: Tensor, reference: Tensor, shapes: Tensor) -> Tensor:
    """Move samples off the centres of pixels, where a rounding decides which gradient is right."""
    size = shapes.flip(-1)[:, None].double()  # (L, 1, 2) as (width, height)
    pixels = offset_locations(offsets.double(), reference.double(), shapes) * size - 0.5
    fraction = pixels - pixels.floor()
    moved = (1 - 2 * MARGIN_OF_PIXELS) * fraction + MARGIN_OF_PIXELS - fraction
    if reference.shape[-1] == 4:
        moved = moved / size * 2 * offsets.shape[-2] / reference[:, :, None, :, None, 2:].double()
    return (offsets + moved).float()


def outcome(op: str, run: Callable[..., Tensor], arguments: Arguments, pieces: int = 1) -> dict[str, Tensor]:
    """Return the output and all gradients of the output weighted by fixed noise, the queries taken in ``pieces``."""
    axis, by_query = (1, (3, 4, 5, 8)) if op == 'ms_deform_attn' else (2, (0, 3))
    copies = [x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in arguments]
    leaves = {f'argument {i}': x for i, x in enumerate(copies) if isinstance(x, Tensor) and x.requires_grad}
    for x in copies:
        if isinstance(x, nn.Module):
            x.zero_grad()
            leaves |= dict(x.named_parameters())
    queries = copies[by_query[0]].shape[axis]
    step, outputs = -(-queries // pieces), []
    for start in range(0, queries, step):
        count = min(step, queries - start)
        part = [x.narrow(axis, start, count) if i in by_query and x is not None else x for i, x in enumerate(copies)]
        output = run(*part)
        outputs.append(output.detach())
        shape = [*output.shape[:axis], queries, *output.shape[axis + 1 :]]
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(1)).narrow(axis, start, count)
        output.backward(noise.to(output))
    gradients = {f'the gradient of {name}': x.grad for name, x in leaves.items() if x.grad is not None}
    return {'the output': torch.cat(outputs, axis), **gradients}


def exact(op: str, arguments: Arguments) -> dict[str, Tensor]:
    """Return the :func:`outcome` of the float64 reference, in float32."""
    wide: list[Any] = []
    for x in arguments:
        if isinstance(x, Tensor) and x.is_floating_point():
            x = x.detach().double().requires_grad_(x.requires_grad)
        wide.append(deepcopy(x).double() if isinstance(x, nn.Module) else x)
    found = outcome(op, find(op, OPERATORS[op], 'torch').run, tuple(wide), PIECES)
    return {name: x.float().cpu() for name, x in found.items()}


def disagreement(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> str | None:
    """Return where ``found`` is further from ``expected`` than ``tolerance`` of its largest number, or None."""
    for name, right in expected.items():
        if name not in found:
            return f'{name} is missing'
        off, scale = (found[name].float().cpu() - right).abs().max().item(), max(right.abs().max().item(), 1e-3)
        if not off <= tolerance * scale:  # nor if it is no number
            return f'{name} is off by {off:.1e} where the reference has up to {scale:.1e}'
    return None


def judge(row: Row, scale: str, device: torch.device, expected: dict[str, Tensor]) -> Row:
    """Check a row's backend and, where it is right, time it."""
    arguments = problem(row.op, row.size, row.dtype, scale, device)
    backend = find(row.op, OPERATORS[row.op], row.backend)
    row.out = disagreement(outcome(row.op, backend.run, arguments), expected, TOLERANCE[row.dtype])
    tensors = {i: x for i, x in enumerate(arguments) if isinstance(x, Tensor) and x.requires_grad}

    def call(*inputs: Tensor) -> Tensor:
        given = dict(zip(tensors, inputs, strict=True))
        return backend.run(*(given.get(i, x) for i, x in enumerate(arguments)))

    for mode in MODES if row.out is None else ():
        times: list[float] = []
        end = time.perf_counter() + (SECONDS if scale == 'full' else 0.0)  # times of tiny calls say nothing
        while not times or (len(times) < REPETITIONS and time.perf_counter() < end):
            times.append(measure(call, [x.detach() for x in tensors.values()], mode)[0])
        row.ms[mode] = round(1e3 * min(times), 4)  # what else the machine does only adds to it
    return row


def work(task: dict[str, Any]) -> None:
    """Do what a process of its own is started for: form the references, or print a line for each row."""
    device, folder = torch.device(task['device']), Path(task['folder'])
    for given in task['rows']:
        row = Row(**given)
        faulthandler.dump_traceback_later(task['limit'], exit=True)
        stored = folder / f'{row.op} {row.dtype} {row.size}.pt'
        fatal = False
        try:
            if row.backend == 'reference':
                torch.save(exact(row.op, problem(row.op, row.size, row.dtype, task['scale'], device)), stored)
            else:
                judge(row, task['scale'], device, torch.load(stored))
        except Exception as error:
            fatal = not isinstance(error, (ValueError, torch.cuda.OutOfMemoryError))  # which leave the device as it was
            row.out = f'{type(error).__name__}: {error}'.split('\n')[0][:200]
        print(json.dumps(asdict(row)), flush=True)
        if fatal:
            os._exit(1)
    faulthandler.cancel_dump_traceback_later()


def _apart(rows: list[Row], **task: Any) -> Iterator[Row]:
    """Yield the rows as processes of their own fill them in; one that ends early has its row out."""
    package = Path(__file__).parents[2]
    # without mm packages a process starts in a tenth of the time; mmcv's operator is imported where it is asked for
    paths = os.pathsep.join(filter(None, (str(package), os.environ.get('PYTHONPATH'))))
    environment = os.environ | {'PYTHONPATH': paths, 'MMGATE_TORCH_ALONE': '1'}
    while rows:
        given = json.dumps(dict(task, rows=[asdict(row) for row in rows]))
        command = [sys.executable, '-W', 'ignore', '-m', 'mmgate.benchmarks.calibration', given]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        found = [Row(**json.loads(line)) for line in done.stdout.splitlines() if line.startswith('{"op"')]
        yield from found
        rows = rows[len(found) :]
        if rows and 'Timeout (' in done.stderr:
            reasons = [f'took longer than {task["limit"]} s'] + ['not tried, as it hung before'] * (len(rows) - 1)
            yield from (replace(row, out=reason) for row, reason in zip(rows, reasons, strict=True))
            return
        if rows and (not found or not found[-1].out):  # the one after what was told
            last = ''.join(done.stderr.splitlines()[-1:])[:200]
            yield replace(rows[0], out=f'its process ended with {done.returncode}: {last}')
            rows = rows[1:]


def compare(
    device: torch.device, dtypes: Sequence[str], scale: str = 'full', limit: int = 60, sizes: Sequence[str] = SIZES
) -> Iterator[Row]:
    """Yield a row for each operator's backends that can run, in each dtype and size.

    Args:
        device: Where to run.
        dtypes: Keys of :data:`DTYPES`.
        scale: ``'full'`` or ``'tiny'``.
        limit: Seconds for one backend's call and its timing, compilation included.
        sizes: Of :data:`mmgate.ops.backend.SIZES`.
    """
    heads = {dtype: torch.empty(1, 1, 1, 1, device=device, dtype=DTYPES[dtype]) for dtype in dtypes}
    with tempfile.TemporaryDirectory() as folder:
        task = dict(device=str(device), scale=scale, limit=limit, folder=folder)
        for op, backends in OPERATORS.items():
            cases = [(op, dtype, size) for dtype in dtypes for size in sizes]
            missing = {row.size: row.out for row in _apart([Row(*x, 'reference') for x in cases], **task) if row.out}
            if missing:
                raise RuntimeError(f'{op}: there is no reference to compare with: {missing}')
            for backend in backends:
                rows = [Row(*x, backend.name) for x in cases if backend.why_not(heads[x[1]]) is None]
                yield from _apart(rows, **task)


def keep(rows: Sequence[Row], device: torch.device) -> dict[tuple[str, str, str], str]:
    """Write the fastest backends into the calibration's file, and return them by operator, dtype and size.

    The first of the order that is right stays, unless another takes less than 95 % of its time. The reference is none,
    where there is another: a longer call's tensors would not fit into memory.
    """
    kept = {}
    for case in dict.fromkeys((row.op, row.dtype, row.size) for row in rows):
        right = {row.backend: row.ms[MODES[1]] for row in rows if (row.op, row.dtype, row.size) == case and not row.out}
        first = next((b.name for b in OPERATORS[case[0]] if b.in_order and b.name in right), None)
        if right:
            best = min(right, key=lambda name: (name == 'torch', right[name]))
            kept[case] = first if first and right[best] > MARGIN * right[first] else best
    for op in dict.fromkeys(case[0] for case in kept):
        write(op, device, {f'{DTYPES[x[1]]} {x[2]}': name for x, name in kept.items() if x[0] == op})
    return kept


if __name__ == '__main__':
    work(json.loads(sys.argv[1]))
