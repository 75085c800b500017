"""Processes that a tool starts end with it, and a folder has one tool at a time."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from children import alone
from conftest import tool
from helpers.small_demo import DEMO

from mmgate.errors import ConfigError

study, page = tool('study'), tool('page')
STARTS: dict[str, Callable[[Path], None]] = {
    'quiet run': lambda folder: study.run_tool(1, ['train', 'c.py', '--work-dir', str(folder)], quiet=True),
    'run': lambda folder: study.run_tool(1, ['train', 'c.py', '--work-dir', str(folder)]),
    'figure': lambda folder: page.run(['plot_gates'], verbose=True),
}


def is_there(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize('start', STARTS)
def test_sigterm_ends_the_child_first(start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python, child = tmp_path / 'python', tmp_path / 'child'
    python.write_text(f'#!/bin/sh\necho $$ > {child}.part\nmv {child}.part {child}\nexec sleep 5\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, 'executable', str(python))

    def stop() -> None:
        while not child.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    # A fault then fails the test, and does not end pytest.
    former = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        threading.Thread(target=stop, daemon=True).start()
        with pytest.raises(SystemExit, match='143'):
            STARTS[start](tmp_path)
        assert not is_there(int(child.read_text()))
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, former)


def test_a_second_start_is_told_who_holds_the_folder(tmp_path: Path) -> None:
    lock = tmp_path / 'out/lock'
    with alone(lock):
        told = rf'out is in use by process {os.getpid()} on .*end it, or give .*--out'
        with pytest.raises(ConfigError, match=told), alone(lock):
            pass
    with alone(lock):
        pass


def test_a_study_holds_its_folder(tmp_path: Path) -> None:
    (tmp_path / 'study.py').write_text(f"runs = dict(vanilla={str(DEMO)!r})\nseeds = [0]\nmetric = 'mAP'\n")
    with alone(tmp_path / 'lock'), pytest.raises(ConfigError, match='is in use'):
        study.main([str(tmp_path / 'study.py'), '--out', str(tmp_path)])
