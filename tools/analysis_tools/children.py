"""Processes that a tool starts end with it, and a folder has one tool at a time."""

import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mmgate.errors import ConfigError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


@contextmanager
def ending() -> Iterator[None]:
    """Let SIGTERM raise SystemExit in a ``with`` block, so that it can end children; slurm and Docker send it."""
    former = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)


@contextmanager
def alone(lock: Path) -> Iterator[None]:
    """Hold a lock file inside a ``with`` block; the system lets go of it when the process and its children have ended.

    Raises:
        ConfigError: Another process holds it, or it cannot be written.
    """
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        opened = lock.open('a+')
    except OSError as error:
        raise ConfigError(f'{lock.parent} cannot be written ({error.strerror}); give another --out.') from error
    with opened as file:
        try:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise ConfigError(
                f'{lock.parent} is in use by process {file.read() or "of another user"} ({lock}). Wait for it, end it, '
                'or give another --out.'
            ) from error
        # Some file systems have no locks: there nothing is held.
        except OSError:
            pass
        file.truncate(0)
        file.write(f'{os.getpid()} on {socket.gethostname()}')
        file.flush()
        yield
