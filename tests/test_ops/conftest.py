"""The CPU kernels' library for older processors, of which this one has all instructions, and numbers of threads."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

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


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    """A function that sets the number of threads for the rest of a test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(params=[1, 7], ids=['one_thread', 'more_than_heads'])
def threads(request: pytest.FixtureRequest, set_threads: Callable[[int], None]) -> None:
    set_threads(request.param)


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> str:
    """A backend's name; Triton's kernels are skipped where they do not run on the test's device."""
    if request.param == 'triton':
        pytest.importorskip('triton', minversion='3.2')
        request.getfixturevalue('on_device')
    return request.param


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    return 'cpu' if request.node.get_closest_marker('gpu') is None else 'cuda'
