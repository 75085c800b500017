"""The library of CPU kernels: loaded once, or left out with the reason and the command that mends it."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import needs_native
from helpers.samplings import attend, make

from mmgate.ops import native
from mmgate.ops.native import build

COMMAND = 'python -m mmgate.doctor --build'


@pytest.fixture(autouse=True)
def loaded_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget the library before a test and after it."""
    native.load.cache_clear()
    yield
    monkeypatch.undo()
    native.load.cache_clear()


@pytest.mark.parametrize(
    'text, reason',
    [
        (None, f'it is not compiled for this processor yet; type once: {COMMAND}'),
        ('no library', rf'native\.so does not load \(.*\); type: {COMMAND}'),
    ],
    ids=['missing', 'damaged'],
)
def test_a_library_that_is_missing_or_damaged_is_told_with_the_command(
    text: str | None, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / 'native.so').write_text(text)
    monkeypatch.setenv('MMGATE_NATIVE', str(tmp_path / 'native.so'))
    value = torch.rand(1)
    told = native.why_not_native(value)
    assert told is not None and re.fullmatch(reason, told)
    assert told in native.advice_for_native(value) and native.advice_for_native(value.to('meta')) is None
    given = make()
    assert torch.equal(attend(given), attend(given, 'grid_sample'))


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
    assert native.load() == (None, f'it was compiled from other sources or for another processor; type: {COMMAND}')
