"""Time and peak memory of operators, ours and the peers', from one run."""

from __future__ import annotations

import csv
import ctypes
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmgate.analysis.probes.measures import pixel_centres
from mmgate.ops import ms_deform_attn

LEVELS = {  # x: (levels, batch)
    '16x16-2x2_b8': ([(16, 16), (8, 8), (4, 4), (2, 2)], 8),
    '800x1072_b1': ([(100, 134), (50, 67), (25, 34), (13, 17)], 1),
}
TOKENS = (1024, 4096)
MODES = ('forward', 'forward+backward')
Within = Callable[[], AbstractContextManager[Any]]
LEAD = 20_000_000  # cycles that a GPU waits before a measurement, about 10 ms


@dataclass(frozen=True)
class Row:
    """One measurement: percentiles over repetitions of ``metric`` in ``unit``, and the peer's over ours.

    The latter is the median over pairs of repetitions that were measured one after the other, so that what else the
    machine does hits both alike.
    """

    op: str
    provider: str
    mode: str
    metric: str
    unit: str
    x: str
    y_50: float
    y_20: float
    y_80: float
    ratio_to_peer: float
    device: str
    version: str


def _mmcv(value: Tensor, shapes: Tensor, start: Tensor, locations: Tensor, logits: Tensor) -> Tensor:
    from mmcv.ops.multi_scale_deform_attn import multi_scale_deformable_attn_pytorch

    weights = logits.flatten(-2).softmax(-1).view(logits.shape)
    return multi_scale_deformable_attn_pytorch(value, shapes, locations, weights)


def _ours(backend: str) -> Callable[..., Tensor]:
    return lambda *inputs: ms_deform_attn(*inputs, backend=backend)


def deformable_inputs(
    levels: list[tuple[int, int]], batch: int, heads: int = 8, dim: int = 32, points: int = 4
) -> list[Tensor]:
    """Encoder-like inputs: a query at every pixel of every level, sampling around itself."""
    generator = torch.Generator().manual_seed(0)
    shapes = torch.tensor(levels)
    areas = shapes.prod(1)
    tokens, count = int(areas.sum()), len(levels)
    reference = pixel_centres(levels)
    offsets = 2 * torch.randn(batch, tokens, heads, count, points, 2, generator=generator) / shapes.flip(-1)[:, None]
    return [
        torch.randn(batch, tokens, heads, dim, generator=generator),
        shapes,
        areas.cumsum(0) - areas,
        reference[:, None, None, None] + offsets,
        torch.randn(batch, tokens, heads, count, points, generator=generator),
    ]


def benchmark_ms_deform_attn(repetitions: int = 7) -> Iterator[Row]:
    """Measure the CPU backends beside mmcv's grid_sample fallback."""
    providers: dict[str, Callable[..., Tensor]] = {'mmcv': _mmcv, 'torch': _ours('torch'), 'cpu': _ours('cpu')}
    providers['cpu, compiled'] = providers['cpu']
    compiles = {name: sampler_compiled(name == 'cpu, compiled') for name in providers}
    cases = {x: deformable_inputs(levels, batch) for x, (levels, batch) in LEVELS.items()}
    return _benchmark('ms_deform_attn', providers, cases, repetitions, compiles)


def benchmark_gated_layers(repetitions: int = 7) -> Iterator[Row]:
    """Measure the SDPA gate and M-DGSA as layers beside a layer of plain fused attention (256 channels, 8 heads)."""
    from mmgate.layers import DifferentialGatedAttention, SDPAGatedAttention

    def run(layer: nn.Module) -> Callable[[Tensor], Tensor]:
        return lambda x: layer(x, x, x, need_weights=False)[0]

    layers: dict[str, nn.Module] = {
        'plain SDPA': nn.MultiheadAttention(256, 8, batch_first=True),
        'SDPA gate': SDPAGatedAttention(256, 8, batch_first=True),
        'M-DGSA': DifferentialGatedAttention(256, 8, batch_first=True),
    }
    providers = {name: run(layer) for name, layer in layers.items()}
    cases = {f'N{tokens}': [torch.randn(2, tokens, 256)] for tokens in TOKENS}
    return _benchmark('gated_layers', providers, cases, repetitions)


def _benchmark(
    op: str,
    providers: Mapping[str, Callable[..., Tensor]],
    cases: Mapping[str, list[Tensor]],
    repetitions: int,
    within: Mapping[str, Within] | None = None,
) -> Iterator[Row]:
    """Yield rows for every input and mode, the first provider being the peer."""
    for x, inputs in cases.items():
        for mode in MODES:
            yield from interleaved(op, providers, x, inputs, mode, repetitions, within)


def sampler_compiled(compiled: bool) -> Within:
    """Return a context in which the CPU's sampler runs compiled, or as it is."""
    return partial(environment, 'MMGATE_CPU_COMPILE', str(int(compiled)))


@contextmanager
def environment(variable: str, value: str) -> Iterator[None]:
    """Set an environment variable, and set it back."""
    before = os.environ.get(variable)
    os.environ[variable] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before


def interleaved(
    op: str,
    providers: Mapping[str, Callable[..., Tensor]],
    x: str,
    inputs: list[Tensor],
    mode: str,
    repetitions: int,
    within: Mapping[str, Within] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[Row]:
    """Yield time and peak memory of every provider; their repetitions alternate, so that noise hits all alike.

    What does not run is left out, and a warning says why.

    Args:
        op: Name of what is measured.
        providers: By name; the first that runs is the peer.
        x: Name of the input.
        inputs: Arguments of a provider.
        mode: One of :data:`MODES`, or ``'step'`` for what goes backward by itself.
        repetitions: Measurements after one that warms up.
        within: Makes a context in which a provider runs, forward and backward.
        clock: What tells the seconds on a CPU.

    Raises:
        RuntimeError: None of them runs.
    """
    runs = dict(providers)
    times: dict[str, list[float]] = {name: [] for name in providers}
    memory: dict[str, list[float]] = {name: [] for name in providers}
    for repetition in range(repetitions + 1):
        for name, run in list(runs.items()):
            try:
                with (within or {}).get(name, nullcontext)():
                    seconds, peak = measure(run, inputs, mode, clock)
            except Exception as error:  # a kernel that does not compile, no memory, a package that is missing
                if repetition:
                    raise
                reason = f'{type(error).__name__}: {error}'.split('\n')[0][:200]
                warnings.warn(f'{name} is left out, {mode}: {reason}', stacklevel=2)
                del runs[name]
                continue
            if repetition:  # the first one warms up and compiles
                times[name].append(seconds * 1e3)
                memory[name].append(peak / 2**20)
    if not runs:
        raise RuntimeError(f'{op}: none of {", ".join(providers)} runs here on {x}, {mode}.')
    peer = next(iter(runs))
    for metric, unit, values in (('time', 'ms', times), ('peak memory', 'MiB', memory)):
        for name in runs:
            yield row_of(op, name, mode, metric, unit, x, values[name], values[peer], inputs[0].device)


def measure(
    run: Callable[..., Tensor], inputs: list[Tensor], mode: str, clock: Callable[[], float] = time.perf_counter
) -> tuple[float, float]:
    """Return seconds and bytes of peak memory over idle of one call, on the device of the inputs; see interleaved."""
    return _measure_cuda(run, inputs, mode) if inputs[0].is_cuda else _measure(run, inputs, mode, clock)


def _leaves(inputs: list[Tensor], mode: str) -> list[Tensor]:
    return [x.clone().requires_grad_(mode == MODES[1]) if x.is_floating_point() else x for x in inputs]


def _call(run: Callable[..., Tensor], leaves: list[Tensor], mode: str) -> None:
    with torch.set_grad_enabled(mode != 'forward'):
        output = run(*leaves)
    if mode == MODES[1]:
        output.backward(torch.ones_like(output))


def _measure_cuda(run: Callable[..., Tensor], inputs: list[Tensor], mode: str) -> tuple[float, float]:
    leaves = _leaves(inputs, mode)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    idle = torch.cuda.memory_allocated()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if mode in MODES:  # what is timed is kernels, which the CPU queues meanwhile, and not how fast it does
        torch.cuda._sleep(LEAD)
    start.record()
    _call(run, leaves, mode)
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3, torch.cuda.max_memory_allocated() - idle


def saved_bytes(run: Callable[..., Tensor], inputs: list[Tensor]) -> int:
    """Return the bytes that a forward pass keeps for the backward pass, inputs included, each storage once."""
    storages: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        run(*_leaves(inputs, 'forward+backward'))
    return sum(storages.values())


def _measure(
    run: Callable[..., Tensor], inputs: list[Tensor], mode: str, clock: Callable[[], float]
) -> tuple[float, float]:
    leaves = _leaves(inputs, mode)
    ctypes.CDLL('libc.so.6').malloc_trim(0)  # what an earlier call freed must not hide what this one takes
    Path('/proc/self/clear_refs').write_text('5')  # resets the high-water mark
    idle = _status('VmRSS')
    start = clock()
    _call(run, leaves, mode)
    seconds = clock() - start
    return seconds, max(0, _status('VmHWM') - idle)


def _status(key: str) -> int:
    for line in Path('/proc/self/status').read_text().splitlines():
        if line.startswith(key + ':'):
            return int(line.split()[1]) * 1024
    raise OSError(f'/proc/self/status has no {key}; memory is measured on Linux only.')


def row_of(
    op: str,
    provider: str,
    mode: str,
    metric: str,
    unit: str,
    x: str,
    values: list[float],
    peer: list[float],
    device: torch.device,
) -> Row:
    """Return a row of percentiles over ``values``."""
    middle = statistics.median(values)
    low, high = (torch.tensor(values).quantile(q).item() for q in (0.2, 0.8))
    return Row(
        op=op,
        provider=provider,
        mode=mode,
        metric=metric,
        unit=unit,
        x=x,
        y_50=round(middle, 3),
        y_20=round(low, 3),
        y_80=round(high, 3),
        ratio_to_peer=round(statistics.median(p / max(y, 1e-9) for p, y in zip(peer, values, strict=True)), 3),
        device=torch.cuda.get_device_name(device)
        if device.type == 'cuda'
        else f'{platform.machine()} CPU, {torch.get_num_threads()} threads',
        version=f'torch {torch.__version__}',
    )


def throughput(row: Row, batch: int) -> Row:
    """Return a row of time as one of images a second."""
    low, middle, high = (round(1e3 * batch / y, 3) for y in (row.y_80, row.y_50, row.y_20))
    ratio = round(1 / max(row.ratio_to_peer, 1e-3), 3)
    row = replace(row, metric='throughput', unit='images/s', ratio_to_peer=ratio)
    return replace(row, y_20=low, y_50=middle, y_80=high)


def write_csv(rows: list[Row], path: str | Path) -> None:
    """Write rows under the column names that every benchmark here shares."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(path, 'w', newline='') as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)])
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
