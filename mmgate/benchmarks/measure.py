"""Measure time and peak memory of our code and of other packages (peers) side by side, as rows of a CSV file."""

from __future__ import annotations

import csv
import ctypes
import importlib.metadata
import os
import platform
import re
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmgate.errors import first_line

MODES = ('forward', 'forward+backward')
Providers = Mapping[str, Callable[..., Tensor]]
Within = Callable[[], AbstractContextManager[Any]]
Key = tuple[str, str, str, str, str, str]
LEAD = 20_000_000  # cycles that a GPU waits before a measurement, about 10 ms


@dataclass(frozen=True)
class Row:
    """One row of a benchmark's CSV file: percentiles of a metric over repetitions, and the peer's value over ours.

    The ratio is the median over pairs of repetitions that were measured one after the other, so that other work on the
    machine slows both alike.
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


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    """Set environment variables inside a ``with`` block, and restore them afterwards."""
    before = {name: os.environ.pop(name, None) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            del os.environ[name]
            if value is not None:
                os.environ[name] = value


def interleaved(
    op: str,
    providers: Providers,
    x: str,
    inputs: list[Tensor],
    mode: str,
    repetitions: int,
    within: Mapping[str, Within] | None = None,
    clock: Callable[[], float] = time.perf_counter,
    dtypes: Mapping[str, torch.dtype] | None = None,
    launches: bool = False,
) -> Iterator[Row]:
    """Measure several implementations by turns, so that noise hits all alike; yield time and peak memory of each.

    Args:
        op: Name of the operator in the rows.
        providers: Functions to measure, by name. The first that runs is the peer; one that fails in the first
            repetition is left out with a warning.
        x: Name of the inputs in the rows.
        inputs: Arguments of the functions.
        mode: One of :data:`MODES`, or another name for functions that turn gradients on or off themselves, such as a
            training step.
        repetitions: Measurements of each provider; one more comes first, to warm up.
        within: Functions that make the context in which a provider runs, forward and backward.
        clock: Returns the seconds on a CPU.
        dtypes: By provider, the dtype of its floating-point inputs, which get it before the clock starts; others take
            them as they are.
        launches: True includes the launches of kernels on a GPU in the time; in modes of other names they always are.

    Raises:
        RuntimeError: None of them runs; the message has the reason of each.
    """
    runs = dict(providers)
    reasons: list[str] = []
    times: dict[str, list[float]] = {name: [] for name in providers}
    memory: dict[str, list[float]] = {name: [] for name in providers}
    for repetition in range(repetitions + 1):
        for name, run in list(runs.items()):
            dtype = (dtypes or {}).get(name)
            given = [x.to(dtype) if dtype and x.is_floating_point() else x for x in inputs]
            try:
                with (within or {}).get(name, nullcontext)():
                    seconds, peak = measure(run, given, mode, clock, launches)
            except Exception as error:  # a kernel does not compile, memory runs out, a package is missing
                if repetition:
                    raise
                reason = first_line(error)[:200]
                warnings.warn(f'{name} is left out, {mode}: {reason}', stacklevel=2)
                reasons.append(f'{name}: {reason}')
                del runs[name]
                continue
            if repetition:  # the first repetition warms up and compiles
                times[name].append(seconds * 1e3)
                memory[name].append(peak / 2**20)
    if not runs:
        raise RuntimeError(f'{op}: nothing runs here on {x}, {mode}. {"; ".join(reasons)}')
    peer = next(iter(runs))
    for metric, unit, values in (('time', 'ms', times), ('peak memory', 'MiB', memory)):
        for name in runs:
            yield row_of((op, name, mode, metric, unit, x), values[name], values[peer], inputs[0].device)


def measure(
    run: Callable[..., Tensor],
    inputs: list[Tensor],
    mode: str,
    clock: Callable[[], float] = time.perf_counter,
    launches: bool = False,
) -> tuple[float, float]:
    """Run a call once; return its seconds and its peak memory in bytes above idle, on the device of the inputs.

    Arguments as in :func:`interleaved`.
    """
    leaves = _leaves(inputs, mode)
    if inputs[0].is_cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        idle = torch.cuda.memory_allocated()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # The GPU waits until the CPU has queued the kernels, so that only the kernels are timed.
        if mode in MODES and not launches:
            torch.cuda._sleep(LEAD)
        start.record()
        _call(run, leaves, mode)
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3, torch.cuda.max_memory_allocated() - idle
    # Memory that an earlier call has freed must not hide the memory of this one.
    ctypes.CDLL('libc.so.6').malloc_trim(0)
    # 5 resets the high-water mark.
    Path('/proc/self/clear_refs').write_text('5')
    idle = _status('VmRSS')
    begin = clock()
    _call(run, leaves, mode)
    seconds = clock() - begin
    return seconds, max(0, _status('VmHWM') - idle)


def _leaves(inputs: list[Tensor], mode: str) -> list[Tensor]:
    return [x.clone().requires_grad_(mode == MODES[1]) if x.is_floating_point() else x for x in inputs]


def _call(run: Callable[..., Tensor], leaves: list[Tensor], mode: str) -> None:
    with torch.set_grad_enabled(mode != 'forward'):
        output = run(*leaves)
    if mode == MODES[1]:
        output.backward(torch.ones_like(output))


def _status(key: str) -> int:
    lines = Path('/proc/self/status').read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f'{key}:'))


def row_of(key: Key, values: list[float], peer: list[float], device: torch.device) -> Row:
    """Return the CSV row of percentiles over repeated measurements; ``key`` has the columns from ``op`` to ``x``."""
    low, middle, high = (torch.tensor(values, dtype=torch.float64).quantile(q).item() for q in (0.2, 0.5, 0.8))
    ratio = statistics.median(p / max(y, 1e-9) for p, y in zip(peer, values, strict=True))
    cpu = f'{platform.machine()} CPU, {torch.get_num_threads()} threads'
    where = torch.cuda.get_device_name(device) if device.type == 'cuda' else cpu
    rounded = [round(y, 3) for y in (middle, low, high, ratio)]
    return Row(*key, rounded[0], rounded[1], rounded[2], rounded[3], where, f'torch {torch.__version__}')


def describe_machine(device: torch.device) -> str:
    """Describe the device, its driver and package versions, on which times depend, in one line."""
    name = f'{device.type} of {platform.platform()}'
    if device.type == 'cuda':
        version = Path('/sys/module/nvidia/version')
        driver = version.read_text().strip() if version.is_file() else 'unknown'
        name = f'{torch.cuda.get_device_name(device)}, driver {driver}'
    elif device.type == 'cpu':
        info = Path('/proc/cpuinfo')
        models = re.findall(r'model name\s*: (.+)', info.read_text()) if info.is_file() else []
        name = models[0] if models else platform.processor() or platform.machine()
    installed = {d.metadata['Name']: d.version for d in importlib.metadata.distributions()}
    versions = [f'{x} {installed.get(x) or installed.get(f"onedl-{x}", "none")}' for x in ('triton', 'mmcv')]
    return ', '.join([name, f'torch {torch.__version__}', *versions])


def throughput(row: Row, batch: int) -> Row:
    """Convert a row of times into a row of images per second."""
    low, middle, high = (round(1e3 * batch / y, 3) for y in (row.y_80, row.y_50, row.y_20))
    ratio = round(1 / max(row.ratio_to_peer, 1e-3), 3)
    return replace(row, metric='throughput', unit='images/s', y_50=middle, y_20=low, y_80=high, ratio_to_peer=ratio)


def told(rows: Iterable[Row]) -> Iterator[Row]:
    """Print each row as a line of a table when it comes, and yield it on; a head names the device when it changes."""
    device = ''
    for row in rows:
        if row.device != device:
            device = row.device
            print(f'on {device}')
            head = f'{"x":14} {"mode":17} {"metric":20} {"provider":32}'
            print(f'{head} {"median":>10} {"20 %":>10} {"80 %":>10}  peer/ours')
        name = f'{row.metric} {row.unit}'
        figures = ' '.join(f'{y:10.2f}' for y in (row.y_50, row.y_20, row.y_80, row.ratio_to_peer))
        print(f'{row.x:14} {row.mode:17} {name:20} {row.provider:32} {figures}', flush=True)
        yield row


def write_csv(rows: Iterable[Row], path: str | Path) -> list[Row]:
    """Write rows into a CSV file with the columns of :class:`Row`, each when it comes, and return them."""
    path = Path(path)
    kept = []
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open('w', newline='') as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)])
        writer.writeheader()
        for row in rows:
            writer.writerow(asdict(row))
            file.flush()
            kept.append(row)
    return kept
