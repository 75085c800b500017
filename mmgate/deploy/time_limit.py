"""Limit the time of an exporter, which may reason about symbolic sizes for hours."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# Seconds after which code that has caught the first stop is stopped again.
AGAIN = 10.0


class _Stop(BaseException):
    """Raised in an exporter to end it; not derived from Exception, because exporters catch those and continue."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Interrupt the code in a ``with`` block after so many seconds, by an alarm of the operating system.

    Outside the main thread and on Windows there is no alarm and no limit.

    Args:
        seconds: Time limit; 0 sets none.

    Raises:
        TimeoutError: The code took longer.
    """
    if not seconds or not hasattr(signal, 'SIGALRM') or threading.current_thread() is not threading.main_thread():
        yield
        return
    running = True

    def stop(*_: object) -> None:
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
