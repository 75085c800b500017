"""The compilation of the CPU kernels: the file that it writes, and the reasons why it does not."""

from __future__ import annotations

import platform
import shutil
from pathlib import Path

import pytest

from mmgate.ops.native import build


def test_the_library_lies_beside_its_sources_or_where_a_variable_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv('MMGATE_NATIVE', raising=False)
    assert build.library().parent == build.SOURCES and platform.machine().lower() in build.library().name
    monkeypatch.setenv('MMGATE_NATIVE', str(tmp_path / 'other.so'))
    assert build.library() == tmp_path / 'other.so'


def test_other_sources_have_another_digest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(build.SOURCES, tmp_path / 'cpp'))
    before = build.sources()
    monkeypatch.setattr(build, 'SOURCES', copy)
    assert build.sources() == before
    for name in ('numbers.h', 'softmax.cpp'):
        (copy / name).write_text((copy / name).read_text() + '\n')
        assert build.sources() != before
        before = build.sources()


def test_a_compiler_that_fails_or_none_ends_with_the_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing is left where the library would be."""
    monkeypatch.setenv('MMGATE_NATIVE', str(tmp_path / 'native.so'))
    monkeypatch.setenv('CXX', 'false --option')
    assert build.compiler() == ['false', '--option']
    with pytest.raises(RuntimeError, match='^false fails:'):
        build.build()
    monkeypatch.setenv('CXX', str(tmp_path / 'no-such-compiler'))
    with pytest.raises(RuntimeError, match='no-such-compiler does not run: '):
        build.build()
    monkeypatch.delenv('CXX')
    monkeypatch.setattr(build, 'COMPILERS', ('no-such-compiler',))
    assert build.compiler() is None
    with pytest.raises(RuntimeError, match='none of no-such-compiler is on the path, and CXX is empty'):
        build.build()
    assert not list(tmp_path.iterdir())


def test_the_compiler_of_a_variable_goes_before_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, 'which', lambda name: f'/bin/{name}')
    monkeypatch.delenv('CXX', raising=False)
    assert build.compiler() == ['/bin/c++']
    monkeypatch.setenv('CXX', 'ccache clang++')
    assert build.compiler() == ['ccache', 'clang++']
