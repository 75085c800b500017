"""Choose the backend (implementation) that runs an operator: by a fixed order, or by times on this machine.

A name asks for exactly that backend. ``auto`` takes the first of the order that can run, or the one that ``python -m
mmgate.doctor --calibrate`` found to be faster for the dtype and the size. A backend that raises
:class:`~mmgate.errors.UnsupportedCall` hands the call on to the next one. All backends compute the same function. The
choice changes speed and memory alone.

Environment: ``MMGATE_<OP>=<backend>`` has the last word for one operator; ``MMGATE_CALIBRATION`` is the calibration's
file, ``~/.cache/mmgate/calibration.json`` by default, empty for none.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmgate.errors import ConfigError, UnsupportedCall

from .tracing import hides_numbers, is_exporting, is_traced

logger = logging.getLogger('mmgate')
SIZES = ('small', 'medium', 'large')
Work = tuple[int, int, int]
OPERATORS: dict[str, tuple[Backend, ...]] = {}  # each operator's backends, the preferred first
_logged: set[tuple[str, str]] = set()


def every_tensor(tensor: Tensor) -> str | None:
    """Return None, as a backend's ``why_not`` does if it can run on every tensor."""
    return None


def on_every_tensor(tensor: Tensor) -> bool:
    """Return True, as a backend's ``in_order`` does if ``auto`` may take it everywhere."""
    return True


def on_no_tensor(tensor: Tensor) -> bool:
    """Return False, as a backend's ``first`` does if it keeps its place in the order."""
    return False


def no_advice(tensor: Tensor) -> str | None:
    """Return None, as a backend's ``advice`` does if nothing has to be installed or built for it."""
    return None


@dataclass(frozen=True)
class Backend:
    """One implementation of an operator, with the conditions under which it can run.

    Attributes:
        name: The name in configs, arguments and the environment variable.
        run: The implementation. It takes the operator's arguments by name and raises
            :class:`~mmgate.errors.UnsupportedCall` for a call that it does not have.
        why_not: Takes the operator's first tensor and returns why this backend cannot run on it, or None if it can.
        in_order: Takes the operator's first tensor and returns True if ``auto`` may take it without a calibration.
        first: Takes the operator's first tensor and returns True where it was found the fastest: there it comes first.
        traceable: True if torch.compile takes it whole, that is, it asks for no tensor's numbers.
        exportable: True if an exported model may hold it: it is traceable, and made of torch's own operators alone.
        description: A few words for the log.
        advice: Takes the operator's first tensor and returns what a user can do to have this backend, or None; for the
            log, if another backend runs.
    """

    name: str
    run: Callable[..., Tensor]
    why_not: Callable[[Tensor], str | None] = every_tensor
    in_order: Callable[[Tensor], bool] = on_every_tensor
    first: Callable[[Tensor], bool] = on_no_tensor
    traceable: bool = True
    exportable: bool = False
    description: str = 'its backend'
    advice: Callable[[Tensor], str | None] = no_advice


def run(
    op: str, backends: Sequence[Backend], tensor: Tensor, requested: str | None, work: Work, /, **arguments: Any
) -> Tensor:
    """Run an operator with the best backend; if that cannot run this call, with the next one.

    Args:
        op: The operator's name.
        backends: All of its backends, the preferred first.
        tensor: The input whose device and dtype decide.
        requested: A backend's name, ``'auto'`` or None, see :func:`candidates`.
        work: See :func:`candidates`.
        **arguments: All arguments of the operator, checked. Each backend's function names and types them.

    Raises:
        ConfigError: See :func:`candidates`.
        UnsupportedCall: None of the candidates has this call.
    """
    chosen, reason = candidates(op, backends, tensor, requested, work)
    first = chosen[0]
    if not is_traced() and (op, first.name) not in _logged:
        _log_choice(op, backends, first, reason, tensor, requested)
    for backend in chosen[:-1]:
        try:
            return backend.run(**arguments)
        except UnsupportedCall as error:
            if not is_traced():
                message = f'{op}: {backend.name!r} hands a call on to the next: {error}'
                _log_once(op, f'{backend.name} refused', message)
    return chosen[-1].run(**arguments)


def _log_choice(
    op: str, backends: Sequence[Backend], first: Backend, reason: str, tensor: Tensor, requested: str | None
) -> None:
    """Log which backend runs and why, and how the user gets a faster one."""
    line = f'{op} runs on {first.description} ({first.name!r}), {reason}'
    if (requested or 'auto') == 'auto':
        for preferred in backends[: backends.index(first)]:
            advice = preferred.advice(tensor)
            if advice:
                line += f'. {advice}'
    if tensor.is_cuda and not winners(op, tensor.device.type, tensor.device.index):
        line += '. To have auto take the fastest on this GPU, type once: python -m mmgate.doctor --calibrate'
    _log_once(op, first.name, f'{line}.')


def candidates(
    op: str, backends: Sequence[Backend], tensor: Tensor, requested: str | None = None, work: Work = (0, 0, 0)
) -> tuple[list[Backend], str]:
    """Return the backends to try for a call of an operator, the best first, and the reason why it is the best.

    Args:
        op: The operator's name.
        backends: All of its backends, the preferred first.
        tensor: The input whose device and dtype decide.
        requested: A backend's name, or ``'auto'``, as None; the environment variable ``MMGATE_<OP>`` comes before it.
        work: Samples or pairs of the call, and the largest numbers of them in a small and in a medium call.

    Raises:
        ConfigError: An unknown name, or the backend asked for cannot run on ``tensor``; the message gives the reason.
    """
    variable = f'MMGATE_{op.upper()}'
    from_environment = os.environ.get(variable)
    name = from_environment or requested or 'auto'
    if name != 'auto':
        asked = find(op, backends, name, variable if from_environment else 'backend')
        reason = asked.why_not(tensor)
        if reason is not None:
            names = ', '.join(b.name for b in backends if b.why_not(tensor) is None)
            raise ConfigError(f'{op}: backend {name!r} cannot run here: {reason}. Usable here: {names}, auto.')
        return [asked], 'as asked for'
    if is_exporting():
        exportable = [backend for backend in backends if backend.exportable]
        return exportable[:1], 'the one that exported models can hold'
    hidden = hides_numbers(tensor)
    usable = [b for b in backends if (b.traceable or not hidden) and b.why_not(tensor) is None]
    winner = _winner(op, tensor.device.type, tensor.device.index, tensor.dtype, size_class(*work))
    fastest = [b for b in usable if b.name == winner]
    why = 'the fastest here, by calibration' if fastest else 'the first of the order that can run here'
    return fastest + [b for b in ordered(usable, tensor) if b.name != winner], why


def ordered(backends: Sequence[Backend], tensor: Tensor) -> list[Backend]:
    """Return the backends that ``auto`` may take for a tensor without a calibration, the preferred first."""
    allowed = [backend for backend in backends if backend.in_order(tensor)]
    return sorted(allowed, key=lambda backend: not backend.first(tensor))


def find(op: str, backends: Sequence[Backend], name: Any, source: str = 'backend') -> Backend:
    """Return the backend of an operator that has this name.

    Raises:
        ConfigError: There is none of that name; the message lists the names there are.
    """
    by_name = {backend.name: backend for backend in backends}
    if name not in by_name:
        raise ConfigError(f'{op}: {source}={name!r} is not a backend; choose one of {", ".join(["auto", *by_name])}.')
    return by_name[name]


def size_class(number: int, small: int, medium: int) -> str:
    """Classify a call by its number of samples or pairs as ``'small'``, ``'medium'`` or ``'large'``."""
    return SIZES[0] if number <= small else SIZES[1] if number <= medium else SIZES[2]


@torch.compiler.assume_constant_result
def _winner(op: str, device_type: str, index: int | None, dtype: torch.dtype, size: str) -> str | None:
    """Return the name of the backend that the calibration found fastest for a call, or None.

    torch.compile calls this once, while it traces.
    """
    return winners(op, device_type, index).get(f'{dtype} {size}')


@functools.cache
def winners(op: str, device_type: str, index: int | None) -> dict[str, str]:
    """Return the fastest backends on this machine by dtype and size, as calibrated; empty before a calibration."""
    kept = read() if path() and (device_type != 'cuda' or torch.cuda.is_available()) else {}
    device = torch.device(device_type if index is None else f'{device_type}:{index}')
    return kept.get(key(op, device), {}) if kept else {}


def path() -> str:
    """Return the path of the calibration file, or an empty string if none is to be used."""
    cache = os.environ.get('MMGATE_CACHE') or Path.home() / '.cache/mmgate'
    return os.environ.get('MMGATE_CALIBRATION', str(Path(cache) / 'calibration.json'))


def read() -> dict[str, dict[str, str]]:
    """Read the calibration file: for each machine (:func:`key`), the fastest backends by dtype and size."""
    try:
        return json.loads(Path(path()).read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        logger.warning('The calibration %s cannot be read: %s', path(), error)
        return {}


def write(op: str, device: torch.device, names: dict[str, str]) -> None:
    """Write the fastest backends of an operator on this machine, by dtype and size, into the calibration file."""
    target = Path(path())
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f'{target.name}.{os.getpid()}')
    part.write_text(json.dumps(read() | {key(op, device): names}, indent=1) + '\n')
    # Another process sees the whole file or the old one.
    part.replace(target)
    winners.cache_clear()


def key(op: str, device: torch.device) -> str:
    """Return a text that names all on which a calibration depends: machine, kernels' sources and usable backends."""
    heads = torch.empty(1, 1, 1, 1, device=device)
    usable = ' '.join(backend.name for backend in OPERATORS[op] if backend.why_not(heads) is None)
    digest = hashlib.sha256()
    here = Path(__file__).parent
    files = [*(here / op).rglob('*'), *(here / 'native').rglob('*')]
    for source in sorted(x for x in files if x.suffix in ('.py', '.cpp', '.h')):
        digest.update(source.read_bytes())
    return f'{op}: {usable}; sources {digest.hexdigest()[:12]}; {machine(device)}'


def machine(device: torch.device) -> str:
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
    # Peers are named only where they are installed, so that a calibration from before stays valid elsewhere.
    versions += [f'{x} {installed[x]}' for x in ('torch-ms-deform-attn', 'deformops') if x in installed]
    return ', '.join([name, f'torch {torch.__version__}', *versions])


def _log_once(op: str, subject: str, text: str) -> None:
    """Log a message once for each operator and subject, in mmengine's log if there is one."""
    if (op, subject) in _logged:
        return
    _logged.add((op, subject))
    mmengine = sys.modules.get('mmengine.logging')
    if mmengine is None:
        logger.info(text)
    else:
        mmengine.print_log(text, logger='current')
