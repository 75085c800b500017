"""Check and time every backend of the operators on this machine, so that ``backend='auto'`` can take the fastest.

Each backend runs in a separate process, which may crash or hang without harm: then the backend is out. Its output and
gradients are compared with a float64 reference on the tensors on which it is timed, at an encoder's and a decoder's
sizes and, for PLuG, with and without a mask. ``python -m mmgate.doctor --calibrate`` prints and keeps the result.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmgate.errors import first_line
from mmgate.layers.gml import GatingModulation
from mmgate.ops import ms_deform_attn, plug_attention
from mmgate.ops.backend import OPERATORS, SIZES, ordered, write
from mmgate.ops.ms_deform_attn import offset_locations

from .measure import MODES, environment, measure
from .ops import LEVELS, sampler_inputs

DTYPES = {name: getattr(torch, name) for name in ('float32', 'float16', 'bfloat16')}
TOLERANCE = {'float32': 5e-3, 'float16': 2e-2, 'bfloat16': 6e-2}  # relative to the largest value
# Backends that compute the float64 reference. The maps of the operators' reference would not fit into memory; the tests
# compare these backends with it.
REFERENCES = {'ms_deform_attn': 'grid_sample', 'plug_attention': 'chunked'}
# Another backend wins if its time is below this share of the time of the first one in the order.
MARGIN = 0.95
SECONDS = 1.0  # for timing a mode
REPETITIONS = 10
EDGE = 0.1  # pixels between a sample and the next pixel's centre, where gradients jump
# For deformable sampling: queries (None: one for each token) and columns of the reference points. For PLuG: tokens, and
# 1 where some are padding; the sizes without padding are multiples of every block.
SHAPES: dict[tuple[str, str], dict[str, tuple[int | None, int]]] = {
    ('ms_deform_attn', 'full'): {'small': (300, 2), 'medium': (900, 4), 'large': (None, 2)},
    ('ms_deform_attn', 'tiny'): {'small': (5, 2), 'medium': (3, 4), 'large': (None, 2)},
    ('plug_attention', 'full'): {'small': (100, 1), 'medium': (1024, 0), 'large': (4096, 0)},
    ('plug_attention', 'tiny'): {'small': (21, 1), 'medium': (32, 0), 'large': (64, 0)},
}
TINY_LEVELS = [(2, 2), (1, 2)]  # small enough for Triton's interpreter
Outcome = dict[str, Tensor]


@dataclass
class Row:
    """Result of one backend: its times in milliseconds, or in ``out`` the reason why it cannot be used."""

    op: str
    dtype: str
    size: str
    backend: str
    ms: dict[str, float] = field(default_factory=dict)
    out: str | None = None


class Problem(NamedTuple):
    """An example call of an operator: a function of the inputs and ``backend``, and inputs alike on every device."""

    call: Callable[..., Tensor]
    inputs: list[Tensor]
    parameters: Mapping[str, Tensor]


def problem(op: str, size: str, dtype: str, scale: str, device: torch.device) -> Problem:
    """Return the example call of an operator in a size, a dtype and a scale (``'full'``, or ``'tiny'`` for tests)."""
    make = _sampler if op == 'ms_deform_attn' else _plug
    call, inputs, parameters = make(scale == 'full', *SHAPES[op, scale][size], device)
    inputs = [x.to(device, DTYPES[dtype]) if x.is_floating_point() else x.to(device) for x in inputs]
    return Problem(call, inputs, parameters)


def _sampler(full: bool, queries: int | None, columns: int, device: torch.device) -> Problem:
    levels = LEVELS if full else TINY_LEVELS
    sizes: dict[str, Any] = {} if full else dict(heads=1, points=2)
    inputs, reference = sampler_inputs(levels, 2 if full else 1, queries, columns, 'cpu', **sizes)
    inputs[3] = _away_from_centres(inputs[3], reference, inputs[1])
    points = reference.to(device)

    def call(value: Tensor, *rest: Tensor, backend: str) -> Tensor:
        reference_points = points.to(torch.promote_types(value.dtype, points.dtype))
        return ms_deform_attn(value, *rest, reference_points=reference_points, backend=backend)

    return Problem(call, inputs, {})


def _plug(full: bool, tokens: int | None, padded: int, device: torch.device) -> Problem:
    count = tokens or 1
    batch = 2 if full else 1
    heads = 8 if full else 2  # the kernel pairs two
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(batch, h, count, 32, generator=generator) for h in (heads, heads, heads, 1, 1)]
    padding = torch.arange(count, device=device) >= count - count // 5
    bias = torch.zeros(batch, 1, 1, count, device=device).masked_fill(padding, -torch.inf) if padded else None
    torch.manual_seed(0)
    gml = GatingModulation('product', activation='tanh', init='paper').to(device)

    def call(q: Tensor, k: Tensor, v: Tensor, gate_q: Tensor, gate_k: Tensor, backend: str) -> Tensor:
        return plug_attention(q, k, v, gate_q, gate_k, gml, bias, backend=backend)

    return Problem(call, inputs, dict(gml.named_parameters()))


def _away_from_centres(offsets: Tensor, reference: Tensor, shapes: Tensor) -> Tensor:
    """Move sampling points away from pixel centres, where the gradient jumps and backends may differ by rounding."""
    size = shapes.flip(-1)[:, None].double()  # (L, 1, 2) as (width, height)
    fraction = (offset_locations(offsets.double(), reference.double(), shapes) * size - 0.5) % 1
    moved = EDGE - 2 * EDGE * fraction
    if reference.shape[-1] == 4:
        moved = moved / size * 2 * offsets.shape[-2] / reference[:, :, None, :, None, 2:].double()
    return (offsets + moved).float()


def outcome(given: Problem, backend: str, wide: bool = False) -> Outcome:
    """Run an example call forward and backward; return its output and all gradients, in float64 if ``wide``.

    The output's gradient is random and always the same.
    """
    inputs = [x.double() if wide and x.is_floating_point() else x.detach() for x in given.inputs]
    leaves = {f'argument {i}': x.requires_grad_() for i, x in enumerate(inputs) if x.is_floating_point()}
    leaves |= given.parameters
    output = given.call(*inputs, backend=backend)
    noise = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output)
    gradients = torch.autograd.grad(output, list(leaves.values()), noise)
    found = {f'the gradient of {name}': x for name, x in zip(leaves, gradients, strict=True)}
    return {name: x.detach().float().cpu() for name, x in {'the output': output, **found}.items()}


def disagreement(found: Outcome, expected: Outcome, tolerance: float) -> str | None:
    """Compare a backend's output and gradients with the expected ones; return a message if they differ, else None.

    A difference of ``tolerance`` times the largest expected value is allowed.
    """
    for name, right in expected.items():
        off = (found[name] - right).abs().max().item()
        scale = max(right.abs().max().item(), 1e-3)
        # This form is true for NaN, too.
        if not off <= tolerance * scale:
            return f'{name} is off by {off:.1e} where the reference has up to {scale:.1e}'
    return None


def judge(row: Row, scale: str, device: torch.device, expected: Outcome) -> Row:
    """Compare the backend of a row with the reference and, if it is correct, time it; return the filled row."""
    given = problem(row.op, row.size, row.dtype, scale, device)
    row.out = disagreement(outcome(given, row.backend), expected, TOLERANCE[row.dtype])
    for mode in MODES if row.out is None else ():
        times: list[float] = []
        # Times of tiny calls mean nothing, so that one is enough.
        end = time.perf_counter() + (SECONDS if scale == 'full' else 0.0)
        while not times or (len(times) < REPETITIONS and time.perf_counter() < end):
            times.append(measure(partial(given.call, backend=row.backend), given.inputs, mode)[0])
        # Other work on the machine only adds time.
        row.ms[mode] = round(1e3 * min(times), 4)
    return row


def work(told: Any, rows: Sequence[Row], scale: str, device: torch.device, folder: str) -> None:
    """Compute the references, or check and time backends, in a separate process that sends each row through a pipe."""
    warnings.simplefilter('ignore')
    # A compiler's output is no part of the doctor's page on stdout.
    os.dup2(2, 1)
    for row in rows:
        stored = Path(folder, f'{row.op} {row.dtype} {row.size}.pt')
        try:
            if row.backend == 'reference':
                given = problem(row.op, row.size, row.dtype, scale, device)
                torch.save(outcome(given, REFERENCES[row.op], wide=True), stored)
            else:
                judge(row, scale, device, torch.load(stored))
        except Exception as error:  # an error of the device returns in all later rows
            row.out = first_line(error)[:200]
        told.send(row)


def _apart(rows: list[Row], limit: int, task: tuple[Any, ...]) -> Iterator[Row]:
    """Let a separate process fill in the rows, so that a crash ends only that process; yield each row.

    Rows that it did not reach get a reason in ``out``.
    """
    context = multiprocessing.get_context('spawn')
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(sender, rows, *task))
    # Without the mm packages a process starts in a tenth of the time. mmcv's operator is imported when it is used.
    with environment(MMGATE_TORCH_ALONE='1', **{f'MMGATE_{op.upper()}': '' for op in OPERATORS}):
        process.start()
    sender.close()
    why = f'took longer than {limit} s'
    found = 0
    try:
        while found < len(rows) and receiver.poll(limit):
            row = receiver.recv()
            found += 1
            yield row
    except EOFError:
        process.join()
        why = f'its process ended with {process.exitcode}'
    finally:
        process.kill()
        process.join()
    reasons = [why, *['not tried, as its process was lost before'] * len(rows)]
    yield from (replace(row, out=reason) for row, reason in zip(rows[found:], reasons, strict=False))


def compare(
    device: torch.device, dtypes: Sequence[str], scale: str = 'full', limit: int = 60, sizes: Sequence[str] = SIZES
) -> Iterator[Row]:
    """Check and time all backends that can run on a device; yield a row for each backend, dtype and size.

    Args:
        device: Device on which the backends run.
        dtypes: Names in :data:`DTYPES`.
        scale: ``'full'`` or ``'tiny'``.
        limit: Seconds for a row, including compilation and timing.
        sizes: Some of :data:`~mmgate.ops.backend.SIZES`.

    Raises:
        RuntimeError: A reference could not be computed.
    """
    heads = {dtype: torch.empty(1, 1, 1, 1, device=device, dtype=DTYPES[dtype]) for dtype in dtypes}
    with tempfile.TemporaryDirectory() as folder:
        apart = partial(_apart, limit=limit, task=(scale, device, folder))
        for op, backends in OPERATORS.items():
            cases = [(op, dtype, size) for dtype in dtypes for size in sizes]
            missing = [row for row in apart([Row(*case, 'reference') for case in cases]) if row.out]
            if missing:
                raise RuntimeError(f'{op}: there is no reference to compare with: {missing}')
            for backend in backends:
                rows = [Row(*case, backend.name) for case in cases if backend.why_not(heads[case[1]]) is None]
                yield from apart(rows) if rows else []


def keep(rows: Sequence[Row], device: torch.device) -> None:
    """Write into the calibration file which backend is the fastest for each operator, dtype and size.

    The first correct backend in the operator's order stays, unless another takes less than 95 % of its time. The
    reference is chosen only where no other is correct, because a longer call's tensors would not fit into memory.
    """
    right: dict[tuple[str, str, str], dict[str, float]] = {}
    for row in rows:
        if not row.out:
            right.setdefault((row.op, row.dtype, row.size), {})[row.backend] = row.ms[MODES[1]]
    kept: dict[str, dict[str, str]] = {}
    heads = torch.empty(1, 1, 1, 1, device=device)
    for (op, dtype, size), times in right.items():
        best = min(times, key=lambda name: (name == 'torch', times[name]))
        first = next((x.name for x in ordered(OPERATORS[op], heads) if x.name in times), best)
        name = first if times[best] > MARGIN * times[first] else best
        kept.setdefault(op, {})[f'{DTYPES[dtype]} {size}'] = name
    for op, names in kept.items():
        write(op, device, names)
