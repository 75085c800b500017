"""The sample of small changes: what it leaves out, and that every file has tests for it."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
from conftest import ROOT


@pytest.fixture(scope='module')
def mutants() -> ModuleType:
    pytest.importorskip('cosmic_ray', reason='needs cosmic-ray: the extra "mutants"')
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / 'tools/dev')
        return import_module('mutants')


def test_every_module_has_tests(mutants: ModuleType) -> None:
    """The file of its name first, then its neighbours."""
    modules = [path.relative_to(ROOT / 'mmgate').as_posix() for path in (ROOT / 'mmgate').rglob('*.py')]
    drawn = [module for module in modules if mutants.group_of(module) is not None]
    assert {mutants.group_of(module) for module in drawn} == set(mutants.GROUPS)
    for module in drawn:
        tests = mutants.tests_of(module)
        assert tests and all((ROOT / test).is_file() for test in tests), module

    def files(folder: str) -> list[str]:
        return sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / 'tests' / folder).glob('test_*.py'))

    first, *others = mutants.tests_of('gates/plug.py')
    assert first == 'tests/test_gates/test_plug.py' and sorted([first, *others]) == files('test_gates')
    of_parts = files('test_gates/test_parts')
    assert sorted(mutants.tests_of('gates/parts/stripes.py')[: len(of_parts)]) == of_parts
    folder = 'tests/test_ops/test_dense'
    assert mutants.tests_of('ops/dense/chunked.py')[0] == f'{folder}/test_chunked.py'
    assert mutants.tests_of('ops/dense/__init__.py')[0] == f'{folder}/test_dense.py'
    first, *others = mutants.tests_of('swap.py')
    assert first == 'tests/test_swap.py' and 'tests/test_gating.py' in others


def test_the_copy_has_the_compiled_library(mutants: ModuleType, tmp_path: Path) -> None:
    libraries = [path.relative_to(ROOT) for path in (ROOT / 'mmgate/ops/native/cpp').glob('*.so')]
    if not libraries:
        pytest.skip('needs the compiled CPU kernels: python -m mmgate.doctor --build')
    mutants.copy_checkout(tmp_path)
    for path in libraries:
        assert (tmp_path / path).read_bytes() == (ROOT / path).read_bytes()


CODE = '''
from __future__ import annotations

Size = int


def area(height: int | None, *, width: Size = 3, **options: float) -> int | float:
    """Return 2 + 2."""
    if height is None or not width > 1:
        return 0
    assert dict(zip('a', 'b', strict=True))
    return height * width + sum(v for v in {**options}.values())
'''


def test_only_what_runs_is_changed(mutants: ModuleType, tmp_path: Path) -> None:
    found = mutants.changes('x.py', CODE)
    lines = CODE.splitlines()
    places = {(lines[place.line - 1].strip(), lines[place.line - 1][place.column]) for place in found}
    header = lines[6]
    assert (header, '3') in places and not {(header, '|'), (header, '*')} & places
    assert {('return 0', '0'), ('return height * width + sum(v for v in {**options}.values())', '+')} <= places
    assert not any('Return 2' in line for line, _ in places)
    assert not any(lines[place.line - 1][place.column :].startswith('True') for place in found)
    product = next(p for p in found if lines[p.line - 1][p.column] == '*')
    assert lines[product.line - 1][product.column - 2 : product.column + 3] == 't * w'
    (tmp_path / 'gates').mkdir()
    (tmp_path / 'gates/area.py').write_text(CODE)
    chosen = mutants.sample(tmp_path, 20, seed=3)
    assert chosen == mutants.sample(tmp_path, 20, seed=3) != mutants.sample(tmp_path, 20, seed=4)
    # For want of other packages.
    assert len(chosen) == len({place for place, _ in chosen}) == 20 // len(mutants.GROUPS)
    assert chosen != mutants.sample(tmp_path, 20, seed=3, groups=['gates']) and not mutants.sample(
        tmp_path, 20, 3, ['ops']
    )


def test_a_file_of_the_core_is_in_no_other_group(mutants: ModuleType) -> None:
    for pattern in mutants.CORE:
        files = [path.relative_to(ROOT / 'mmgate').as_posix() for path in (ROOT / 'mmgate').glob(pattern)]
        assert files and {mutants.group_of(file) for file in files} == {'core'}, pattern
    assert mutants.group_of('gates/plug.py') == 'gates' and mutants.group_of('hosts/points.py') is None
    assert mutants.group_of('deploy/export.py') is None
