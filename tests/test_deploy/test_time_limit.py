"""The time that an attempt may take."""

from __future__ import annotations

import signal
import time
from contextlib import suppress

import pytest
from helpers.exported import hang

from mmgate.deploy import time_limit as limits


def test_what_swallows_the_stop_is_stopped_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, 'AGAIN', 0.05)
    with pytest.raises(TimeoutError, match='more than 0.05 s'), limits.time_limit(0.05):
        with suppress(BaseException):
            hang()
        hang()
    with limits.time_limit(0.05):
        pass
    time.sleep(0.1)  # no alarm is left
    with limits.time_limit(0):
        assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
