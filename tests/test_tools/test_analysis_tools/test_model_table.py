"""The table of models beside the figures of their papers."""

from __future__ import annotations

import re

import pytest
from conftest import one_of_each, tool

table = tool('model_table')
# the cheap ones of every host; tools/analysis_tools/model_table.py counts them all
CHEAP = ('classifier', 'RetinaNet', 'Cascade', 'Semantic FPN', 'UperNet')


ROWS = [r for r in table.ROWS if r.model and r.name.endswith(CHEAP) and '-T' in r.name and 'DeiT' not in r.name]


@pytest.mark.parametrize(
    'row',
    one_of_each(ROWS, lambda row: re.split(r'[ ,]', row.name)[0], lambda row: row.name.rpartition(' ')[2]),
    ids=lambda row: row.name,
)
def test_rows_of_the_table_agree_with_the_papers(row) -> None:
    cells = [cell.strip() for cell in table.markdown(row).split('|')]
    if cells[5]:
        paper, ours = float(cells[5]), float(cells[6])
        assert abs(ours - paper) <= max(0.006 * paper, 0.05) or cells[-2], f'no reason given: {table.markdown(row)}'
    assert len(cells) == len(table.HEADER.splitlines()[0].split('|'))


def test_a_reason_is_said_once_and_named_by_number() -> None:
    lines = ['| a | 1 | why a |', '| b | 2 |  |', '| c | 3 | why c |', '| d | 4 | why a |']
    rows = ['| a | 1 | 1 |', '| b | 2 |  |', '| c | 3 | 2 |', '| d | 4 | 1 |']
    assert table.with_notes(lines) == [*rows, '', '1. why a', '2. why c']
    assert table.with_notes(lines[1:2]) == lines[1:2]
