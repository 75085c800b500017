"""The library of CPU kernels: loaded once, or left out with the reason and the command that mends it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import needs_native

from mmgate.ops import native
from mmgate.ops.native import build


@pytest.fixture(autouse=True)
def loaded_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget the library before a test and after it."""
    native.load.cache_clear()
    yield
    monkeypatch.undo()
    native.load.cache_clear()


def test_a_missing_library_is_told_with_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv('MMGATE_NATIVE', str(tmp_path / 'native.so'))
    assert native.load()[0] is None
    reason = 'it is not compiled for this processor yet; type once: python -m mmgate.doctor --build'
    assert native.why_unavailable() == reason


def test_a_damaged_library_is_told_by_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / 'native.so').write_text('no library')
    monkeypatch.setenv('MMGATE_NATIVE', str(tmp_path / 'native.so'))
    library, reason = native.load()
    assert library is None and reason is not None
    assert reason.startswith('native.so does not load (') and reason.endswith('; type: python -m mmgate.doctor --build')


@needs_native
@pytest.mark.parametrize('other', ['sources', 'processor'])
def test_a_library_of_other_sources_or_another_processor_is_left_out(
    other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, reason = native.load()
    assert isinstance(library, ctypes.CDLL) and reason is native.why_unavailable() is None
    assert native.load()[0] is library
    native.load.cache_clear()
    sources, processor = build.built_from().split()
    monkeypatch.setattr(build, 'built_from', lambda: dict(sources=f'x {processor}', processor=f'{sources} x')[other])
    assert native.load()[0] is None
    assert native.why_unavailable() == (
        'it was compiled from other sources or for another processor; type: python -m mmgate.doctor --build'
    )
