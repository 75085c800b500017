"""The compilation of the CPU kernels: the file that it writes, for which sources and processor."""

from __future__ import annotations

import ctypes
import shlex
import shutil
from pathlib import Path

import pytest

from mmgate.ops.native import build


def test_other_sources_have_another_digest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(build.SOURCES, tmp_path / 'cpp'))
    digests = [build.built_from()]
    monkeypatch.setattr(build, 'SOURCES', copy)
    assert build.built_from() == digests[0]
    for name in ('numbers.h', 'softmax.cpp'):
        (copy / name).write_text((copy / name).read_text() + '\n')
        digests.append(build.built_from())
    assert len(set(digests)) == 3


@pytest.mark.parametrize('name', ['flags', 'Features'])
def test_other_instructions_are_another_processor(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Machines with one home each take their library. The order and other lines do not count, as clock rates."""
    monkeypatch.setattr(build, 'PROCESSOR', tmp_path / 'cpuinfo')

    def digest(text: str | None) -> str:
        if text is not None:
            build.PROCESSOR.write_text(text)
        return build.processor.__wrapped__()

    of_its_name = digest(None)
    first = digest(f'cpu MHz : 2000\n{name}\t: fma avx2\n')
    assert digest(f'cpu MHz : 3000\n{name}\t: avx2 fma\n\n{name}\t: none\n') == first
    assert len({first, of_its_name, digest(f'{name}\t: fma avx2 avx512f\n')}) == 3
    assert digest('no such line\n') == of_its_name
    monkeypatch.delenv('MMGATE_NATIVE', raising=False)
    assert build.library().stem.endswith(build.processor())


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
