"""The answers of measurements: kept in a file, told to the other processes of a run, carried by a checkpoint.

The file is ``dispatch.json`` in ``~/.cache/mmgate`` (or ``MMGATE_CACHE``). An answer's key names all that it depends
on: operator, device, driver, versions of torch, triton and mmgate, dtype and shape class.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import logging
import os
import platform
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger('mmgate')
FORMAT = 1
_carried: dict[str, str] = {}
_made: dict[str, str] = {}


def path() -> Path:
    """Return where answers are kept."""
    return Path(os.environ.get('MMGATE_CACHE') or Path.home() / '.cache/mmgate') / 'dispatch.json'


def machine(device: torch.device) -> str:
    """Return what a device's times depend on, in one line."""
    return _machine(device, torch.get_num_threads() if device.type == 'cpu' else 0)


@functools.cache
def _machine(device: torch.device, threads: int) -> str:
    versions = {'torch': str(torch.__version__)}
    for name in ('triton', 'mmgate'):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = 'none'
    if device.type == 'cuda':
        runtime = torch.version.cuda or torch.version.hip
        what = f'{torch.cuda.get_device_name(device)}, driver {_driver()}, runtime {runtime}'
    elif device.type == 'cpu':
        what = f'{_processor()}, {threads} threads'
    else:
        what = f'{device.type} of {platform.platform()}'
    return ', '.join([what, *(f'{name} {version}' for name, version in versions.items())])


def _driver() -> str:
    try:
        return Path('/sys/module/nvidia/version').read_text().strip()
    except OSError:
        return 'unknown'


def _processor() -> str:
    try:
        lines = Path('/proc/cpuinfo').read_text().splitlines()
        return next(line.partition(':')[2].strip() for line in lines if line.startswith('model name'))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def load(key: str) -> str | None:
    """Return the backend that the file, or a checkpoint of :func:`carry`, has for ``key``."""
    if key in _carried:
        return _carried[key]
    entry = _read().get(key)
    return entry['backend'] if entry else None


def store(key: str, entry: dict[str, Any]) -> None:
    """Keep ``entry``, whose ``'backend'`` is the answer; a file that cannot be written is a warning."""
    try:
        with _locked():
            choices = _read()
            choices[key] = entry
            text = json.dumps({'format': FORMAT, 'choices': choices}, indent=1) + '\n'
            descriptor, name = tempfile.mkstemp(dir=path().parent, prefix='dispatch.', suffix='.tmp')
            with os.fdopen(descriptor, 'w') as file:
                file.write(text)
            os.replace(name, path())  # whole or not at all
    except OSError as error:
        logger.warning('The measured choice of a backend is not kept: %s', error)


def _read() -> dict[str, Any]:
    try:
        content = json.loads(path().read_text())
        if content['format'] == FORMAT and all(isinstance(x['backend'], str) for x in content['choices'].values()):
            return content['choices']
        raise ValueError(f'of format {content["format"]}')
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        logger.warning('%s is broken and will be replaced: %s', path(), error)
        return {}


@contextmanager
def _locked() -> Iterator[None]:
    """Let one process at a time read, change and write, where the system can."""
    path().parent.mkdir(parents=True, exist_ok=True)
    with open(path().with_suffix('.lock'), 'a') as file:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        except (ImportError, OSError):  # another write may then get lost, and is measured again
            pass
        yield


def made() -> dict[str, str]:
    """Return the answers that this process goes by, for a checkpoint."""
    return dict(_made)


def note(key: str, name: str) -> None:
    """Remember that this process goes by an answer, and tell it to the others of the run if this is its first."""
    _made[key] = name
    store_of_run = _store()
    if store_of_run is not None and torch.distributed.get_rank() == 0:
        store_of_run.set(f'mmgate/{key}', name)
        store_of_run.add(f'mmgate/{key}/told', 1)


def carry(answers: Mapping[str, str]) -> None:
    """Go by the answers of an earlier run, from its checkpoint, before those of the file."""
    _carried.update(answers)


def follows() -> bool:
    """Return whether another process decides: all but the first of a distributed run."""
    return _store() is not None and torch.distributed.get_rank() > 0


def told(key: str) -> str | None:
    """Return what the first process of the run has decided so far; never waits, as it may never meet the class."""
    store_of_run = _store()
    # to ask whether a key is there the stores of torch 2.1 have no way but to wait; a counter answers at once
    if store_of_run is None or not store_of_run.add(f'mmgate/{key}/told', 0):
        return None
    return store_of_run.get(f'mmgate/{key}').decode()


def _store() -> Any:
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() == 1:
        return None
    return distributed.distributed_c10d._get_default_store()
