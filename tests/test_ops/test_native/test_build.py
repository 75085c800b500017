"""The compilation of the CPU kernels: the file that it writes, and the reasons why it does not."""

from __future__ import annotations

import ctypes
import platform
import shlex
import shutil
from pathlib import Path

import pytest

from mmgate.ops.native import build


def test_the_library_lies_beside_its_sources_or_where_a_variable_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv('MMGATE_NATIVE', raising=False)
    assert build.library().parent == build.SOURCES and platform.machine().lower() in build.library().name
    assert build.library().stem.endswith(build.processor())
    monkeypatch.setenv('MMGATE_NATIVE', str(tmp_path / 'other.so'))
    assert build.library() == tmp_path / 'other.so'


def test_other_sources_have_another_digest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(build.SOURCES, tmp_path / 'cpp'))
    before = build.built_from()
    monkeypatch.setattr(build, 'SOURCES', copy)
    assert build.built_from() == before
    for name in ('numbers.h', 'softmax.cpp'):
        (copy / name).write_text((copy / name).read_text() + '\n')
        assert build.built_from() != before
        before = build.built_from()


@pytest.mark.parametrize('name', ['flags', 'Features'])
def test_other_instructions_are_another_processor(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Machines with one home each take their library. The order and other lines do not count, as clock rates."""
    listing = tmp_path / 'cpuinfo'
    monkeypatch.setattr(build, 'PROCESSOR', listing)

    def digest(text: str) -> str:
        listing.write_text(text)
        build.processor.cache_clear()
        return build.processor()

    first = digest(f'cpu MHz : 2000\n{name}\t: fma avx2\n')
    assert digest(f'cpu MHz : 3000\n{name}\t: avx2 fma\n\n{name}\t: none\n') == first
    assert digest(f'{name}\t: fma avx2 avx512f\n') != first
    assert digest('no such line\n')
    listing.unlink()
    build.processor.cache_clear()
    assert build.processor() != first
    monkeypatch.undo()
    build.processor.cache_clear()


@pytest.mark.skipif(build.compiler() is None, reason='needs a C++ compiler')
def test_a_compiler_without_the_option_compiles_for_any_processor(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As clang for some processors; without optimisation, which takes long."""
    (tmp_path / 'c++').write_text(
        f'#!/bin/sh\ncase "$*" in *march*) echo unknown >&2; exit 1;; esac\nexec {shlex.join(build.compiler())} "$@"\n'
    )
    (tmp_path / 'c++').chmod(0o755)
    monkeypatch.setenv('CXX', str(tmp_path / 'c++'))
    monkeypatch.setenv('MMGATE_NATIVE', str(tmp_path / 'native.so'))
    ctypes.CDLL(str(build.build('-O0')))
    assert 'does not compile with -march=native' in caplog.text


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
