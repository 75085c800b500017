"""docs/architecture.md names what is there."""

from __future__ import annotations

import re

from conftest import ROOT

PAGE = (ROOT / 'docs/architecture.md').read_text()


def test_every_folder_and_file_of_the_package_has_its_row() -> None:
    package = ROOT / 'mmgate'
    there = {path.name for path in package.iterdir() if (path / '__init__.py').is_file() or path.suffix == '.py'}
    rows = ' '.join(re.findall(r'^\| (`.*?) \|', PAGE, flags=re.M))
    named = {name.rpartition('/')[2] for name in re.findall(r'`([\w./]+)`', rows)}
    assert there - {'__init__.py'} == named


def test_every_path_and_attribute_that_it_names_exists() -> None:
    for name in re.findall(r'`((?:ops|layers|hosts)/[\w/]+\.py)`', PAGE):
        assert (ROOT / 'mmgate' / name).is_file(), name
    code = ''.join(path.read_text() for path in (ROOT / 'mmgate').rglob('*.py'))
    for name in ('leaves_out', 'current_name', 'gate_type', 'gates_disabled', 'restore_attention', 'modulate', 'mix'):
        assert name in PAGE and re.search(rf'\b{name}\b', code), name
