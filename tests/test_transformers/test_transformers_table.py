"""The table of transformers' detectors with our sampler."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip('transformers', '5.20', reason='needs transformers: the extra "transformers"')

from conftest import tool
from helpers.hub_models import build

benchmark = tool('transformers_table', 'dev')


def test_a_table_of_small_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {'DeformableDetr': 'deformable_detr', 'RTDetr': 'rt_detr'}
    monkeypatch.setattr(benchmark, 'build', lambda kind, options: build(names[kind]))
    monkeypatch.setitem(benchmark.MODELS, 'RT-DETR R50', ('RTDetr', (64, 64), {}))
    page = tmp_path / 'page.md'
    page.write_text(f'before\n{benchmark.BEGIN}old\n{benchmark.END}after\n')
    names_given = ['--models', 'Deformable DETR R50', 'RT-DETR R50']
    assert benchmark.main([*names_given, '--rounds', '1', '--file', str(page)]) == 0
    text = page.read_text()
    assert text.startswith('before\n') and text.endswith('after\n') and 'old' not in text
    rows = [line.split('|')[1:-1] for line in text.splitlines() if line.startswith('| ') and ' x ' in line]
    assert [(row[0].strip(), row[2].strip()) for row in rows] == [*zip(names_given[1:], ['4', '2'], strict=True)]
    # no error of a layer at all would be one compared with itself
    assert all(0 < float(row[3]) < 1e-4 and 0 <= float(row[4]) < 1e-4 for row in rows)
