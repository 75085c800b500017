"""``auto`` by measurement: the backend that agrees with the reference and is the fastest on the machine at hand.

The first call of a shape class measures: every backend that can run has to agree with the float64 reference, output and
gradients, on a small problem of the same variant, and is then timed on the call's own tensors. The answer is kept, see
:mod:`mmgate.ops.choices`. So a backend that nobody could try here does no harm, and serves as soon as it is better.

Nothing is measured while a CUDA graph is captured or under deterministic algorithms: there the kept answer holds, else
the order. In a distributed run the first process measures; the others take its answer as soon as they see it.
"""

from __future__ import annotations

import copy
import logging
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from . import choices
from .dispatch import Backend, Problems
from .library import autocast_dtype

logger = logging.getLogger('mmgate')
TOLERANCE = {torch.float64: 1e-6, torch.float32: 5e-3, torch.float16: 2e-2, torch.bfloat16: 6e-2}  # of the largest
BUDGET = 1.0  # seconds of repetitions for all candidates; one call of each may take longer
REPETITIONS = 5
HOPELESS = 2.0  # times the best, from which a candidate is not repeated
MARGIN = 0.95  # of the order's own, below which another's time has to be to take its place

_answers: dict[tuple[Any, ...], Backend] = {}
_calls: dict[tuple[Any, ...], int] = {}
_lock = threading.RLock()


@dataclass
class Measurement:
    """What was found: seconds of a call by backend, and why others are out."""

    seconds: dict[str, float] = field(default_factory=dict)
    out: dict[str, str] = field(default_factory=dict)

    def line(self) -> str:
        """Return the figures in one line, the fastest first."""
        times = ', '.join(f'{name} {1e3 * t:.3g} ms' for name, t in sorted(self.seconds.items(), key=lambda x: x[1]))
        reasons = '; '.join(f'{name} ({reason})' for name, reason in self.out.items())
        return f'{times or "no times"}{". Out: " + reasons if reasons else ""}'


def forget() -> None:
    """Drop this process's answers; those in the file stay."""
    _answers.clear()
    _calls.clear()


def choose(
    op: str,
    backends: Sequence[Backend],
    tensor: Tensor,
    problems: Problems,
    arguments: tuple[Any, ...],
    first: Backend,
) -> Backend:
    """Return the backend for a call: the known answer of its class, what is measured now, or ``first``."""
    grad = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in arguments)
    shape_class = (grad, autocast_dtype(tensor.device.type), *problems.shape_class(*arguments))
    key = (op, tensor.device, torch.get_num_threads(), tensor.dtype, shape_class)
    known = _answers.get(key)
    if known is not None:
        return known
    usable = [backend for backend in backends if backend.why_not(tensor) is None]
    if len(usable) == 1:
        return usable[0]
    with _lock:
        words = ' '.join(str(x) for x in (op, tensor.dtype, *shape_class))
        full = f'{choices.machine(tensor.device)} | {words}'
        if choices.follows():
            return _followed(key, full, usable, first)
        name = choices.load(full)
        chosen = next((backend for backend in usable if backend.name == name), None)
        if chosen is None:
            if not _may_measure(tensor):
                return first
            found = _apart(lambda: measure(backends, usable, problems, arguments, tensor.device, grad), tensor.device)
            chosen = _fastest(found, usable, first)
            logger.info('%s runs on %r: %s [%s]', op, chosen.name, found.line(), words)
            milliseconds = {name: round(1e3 * t, 4) for name, t in found.seconds.items()}
            choices.store(full, dict(backend=chosen.name, ms=milliseconds, out=found.out))
        else:
            logger.info('%s runs on %r, as measured before [%s]', op, chosen.name, words)
        _answers[key] = chosen
        choices.note(full, chosen.name)
        return chosen


def _followed(key: tuple[Any, ...], full: str, usable: Sequence[Backend], first: Backend) -> Backend:
    """Ask for the first process's answer at the calls 1, 2, 4, 8 and so on, never from within a checkpoint.

    A checkpoint recomputes what it ran, and fails if that changes in between.
    """
    _calls[key] = calls = _calls.get(key, 0) + 1
    if calls & (calls - 1):
        return first
    top = getattr(torch._C._autograd, '_top_saved_tensors_default_hooks', lambda _: None)
    if top(True) is not None:
        _answers[key] = first
        return first
    name = choices.told(full)
    chosen = next((backend for backend in usable if backend.name == name), None)
    if chosen is None:
        return first
    _answers[key] = chosen
    choices.note(full, chosen.name)
    return chosen


def _may_measure(tensor: Tensor) -> bool:
    if torch.are_deterministic_algorithms_enabled():
        return False
    return tensor.device.type != 'cuda' or not torch.cuda.is_current_stream_capturing()


def _fastest(found: Measurement, usable: Sequence[Backend], first: Backend) -> Backend:
    if not found.seconds:  # all failed; the call itself will say how
        return first
    name = min(found.seconds, key=lambda name: found.seconds[name])
    if first.name in found.seconds and found.seconds[name] > MARGIN * found.seconds[first.name]:
        return first
    return next(backend for backend in usable if backend.name == name)


def _apart(function: Callable[[], Measurement], device: torch.device) -> Measurement:
    """Run in a thread of its own, where no hook or mode of the caller sees it; random numbers stay as they are.

    An error of the measurement itself leaves it empty: measuring must not be why a training stops.
    """
    dtype = autocast_dtype(device.type)
    result: list[Measurement] = []

    def run() -> None:
        devices = [device] if device.type == 'cuda' else []
        try:
            with torch.random.fork_rng(devices), torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
                if device.type == 'cuda':
                    with torch.cuda.device(device):
                        result.append(function())
                else:
                    result.append(function())
        except Exception as error:
            logger.warning('Backends could not be measured: %s', _short(error))

    _synchronise(device)
    thread = threading.Thread(target=run, name='mmgate-measure')
    thread.start()
    thread.join()
    return result[0] if result else Measurement()


def measure(
    backends: Sequence[Backend],
    usable: Sequence[Backend],
    problems: Problems,
    arguments: tuple[Any, ...],
    device: torch.device,
    grad: bool,
) -> Measurement:
    """Check the ``usable`` of ``backends`` against the reference and time those that agree on ``arguments``."""
    found = Measurement()
    reference = next(backend for backend in backends if backend.name == 'torch')
    elements = problems.elements(*arguments)
    runs: dict[str, Callable[[], Any]] = {}
    for backend in usable:
        if backend.largest is not None and elements > backend.largest:
            found.out[backend.name] = 'its tensors are too large'
            continue
        reason = disagreement(backend, reference, problems.small(*arguments), device, grad)
        if reason is not None:
            found.out[backend.name] = reason
            if not reason.startswith('ValueError'):  # which is how a backend refuses what it does not have
                logger.warning('Backend %r is left out: %s', backend.name, reason)
            continue
        runs[backend.name] = _call(backend, arguments, grad)
    _time(runs, device, found)
    return found


def disagreement(
    backend: Backend, reference: Backend, arguments: tuple[Any, ...], device: torch.device, grad: bool
) -> str | None:
    """Return how ``backend`` differs from the float64 reference on ``arguments`` (on the CPU), or None."""
    wide = tuple(x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in arguments)
    wide = tuple(copy.deepcopy(x).cpu().double() if isinstance(x, nn.Module) else x for x in wide)
    with torch.autocast(device.type, enabled=False):
        expected = _outcome(reference, wide, grad)
    try:
        near = tuple(x.to(device) if isinstance(x, Tensor) else x for x in arguments)
        actual = _outcome(backend, near, grad)
        _synchronise(device)
    except Exception as error:
        return _short(error)
    dtype = min(
        (x.dtype for x in arguments if isinstance(x, Tensor) and x.is_floating_point()), key=lambda d: d.itemsize
    )
    tolerance = TOLERANCE[autocast_dtype(device.type) or dtype]
    for name, exact in expected.items():
        off = (actual[name].double().cpu() - exact).abs().max().item() if exact.numel() else 0.0
        scale = max(exact.abs().max().item() if exact.numel() else 0.0, 1e-3)
        if not off <= tolerance * scale:  # nor if it is no number
            return f'{name} is off by {off:.1e} where the reference has up to {scale:.1e}'
    return None


def _outcome(backend: Backend, arguments: tuple[Any, ...], grad: bool) -> dict[str, Tensor]:
    """Return output and gradients of all floating-point tensors and parameters; fixed noise weights the output."""
    leaves = {}
    copies = []
    for i, x in enumerate(arguments):
        if isinstance(x, Tensor) and x.is_floating_point():
            x = x.detach().clone().requires_grad_(grad and x.requires_grad)
            leaves[f'the gradient of argument {i}'] = x
        elif isinstance(x, nn.Module):
            leaves |= {f'the gradient of {name}': p for name, p in x.named_parameters()}
        copies.append(x)
    with torch.set_grad_enabled(grad):
        output = backend.run(*copies)
        results = {'the output': output.detach()}
        wanted = {name: x for name, x in leaves.items() if grad and x.requires_grad}
        if wanted and output.requires_grad:
            noise = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
            given = noise.to(output.device, output.dtype)
            found = torch.autograd.grad(output, list(wanted.values()), given, allow_unused=True)
            results |= {name: g for name, g in zip(wanted, found, strict=True) if g is not None}
    return results


def _call(backend: Backend, arguments: tuple[Any, ...], grad: bool) -> Callable[[], Any]:
    """Return the call at hand, forward and, if ``grad``, backward, on its own numbers and apart from its graph."""
    copies = tuple(x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in arguments)
    leaves = [x for x in copies if isinstance(x, Tensor) and x.requires_grad]
    for x in copies:
        leaves += [p for p in x.parameters() if p.requires_grad] if isinstance(x, nn.Module) else []

    def run() -> None:
        with torch.set_grad_enabled(grad):
            output = backend.run(*copies)
            if grad:
                torch.autograd.grad(output, leaves, torch.ones_like(output), allow_unused=True)

    return run


def _time(runs: dict[str, Callable[[], Any]], device: torch.device, found: Measurement) -> None:
    """Time the candidates by turns, so that noise hits all alike; a first call warms up unless it takes too long."""
    times: dict[str, list[float]] = {}
    for name, run in runs.items():
        try:
            times[name] = [_seconds(run, device)]
        except Exception as error:  # out of memory, most likely
            found.out[name] = _short(error)
    end = time.perf_counter() + BUDGET
    for _ in range(REPETITIONS):
        best = min((min(t) for t in times.values()), default=0.0)
        for name in times:
            if (
                len(times) > 1
                and time.perf_counter() < end
                and (len(times[name]) == 1 or min(times[name]) < HOPELESS * best)
            ):
                times[name].append(_seconds(runs[name], device))
    found.seconds = {name: statistics.median(t[1:] or t) for name, t in times.items()}


def _seconds(run: Callable[[], Any], device: torch.device) -> float:
    _synchronise(device)
    start = time.perf_counter()
    run()
    _synchronise(device)
    return time.perf_counter() - start


def _synchronise(device: torch.device) -> None:
    if device.type != 'cpu':
        getattr(torch, device.type).synchronize()


def _short(error: Exception) -> str:
    return f'{type(error).__name__}: {error}'.split('\n')[0][:300]
