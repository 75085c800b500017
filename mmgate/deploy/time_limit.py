"""A time limit for exporters, which reason about symbolic sizes for as long as a model gives them reason to."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

AGAIN = 10.0  # seconds after which code that went on is stopped once more


class _Stop(BaseException):
    """Not an Exception: exporters catch those and go on."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Stop the Python code within after some seconds, by an alarm of the operating system.

    There is none, and no limit, outside the main thread and on Windows.

    Args:
        seconds: 0 for no limit.

    Raises:
        TimeoutError: The code took longer.
    """
    if not seconds or not hasattr(signal, 'SIGALRM') or threading.current_thread() is not threading.main_thread():
        yield
        return
    running = True

    def stop(*_: Any) -> None:
        if running:
            raise _Stop

    former = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN)
    try:
        yield
    except _Stop:
        raise TimeoutError(f'it took more than {seconds:g} s') from None
    finally:
        running = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)
