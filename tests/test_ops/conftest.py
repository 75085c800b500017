"""The CPU kernels' library for older processors, of which this one has all instructions."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from mmgate.ops import native
from mmgate.ops.native import build


@functools.cache
def _compiled_for(processor: str) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('MMGATE_NATIVE', str(Path(tempfile.mkdtemp(), 'native.so')))
        return build.build(f'-march={processor}')


@pytest.fixture(params=['native', *(pytest.param(old, marks=pytest.mark.slow) for old in ('x86-64', 'x86-64-v3'))])
def instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Take the library for this processor, or one that is compiled for an older one."""
    if request.param != 'native':
        monkeypatch.setenv('MMGATE_NATIVE', str(_compiled_for(request.param)))
    native.load.cache_clear()
    assert native.why_unavailable() is None
    yield request.param
    monkeypatch.undo()
    native.load.cache_clear()
