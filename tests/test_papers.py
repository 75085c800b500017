"""docs/papers.md answers every row of the five papers, and is what the metafiles say."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, tool

from mmgate._environment import available

papers = tool('papers', 'dev')
ROWS, MODELS = papers.read_rows(), papers.read_models()


def test_every_row_has_an_answer() -> None:
    assert list(papers.find_problems(ROWS, MODELS)) == []


def test_the_page_is_what_the_metafiles_say() -> None:
    assert (ROOT / 'docs/papers.md').read_text() == papers.make_page(ROWS, MODELS), 'python tools/dev/papers.py'


@pytest.mark.parametrize(
    'answer, message',
    [
        (None, 'neither a config nor one of run, option, see, not'),
        ('plug-deit-t_8xb128-300e_in2k', 'stands in no metafile'),
        ('elsewhere::plug/a.py', 'is no config of a host'),
        ({'not': ' '}, 'not says nothing'),
        ({'run': 'tools/analysis_tools/plot_nothing.py'}, 'is no file'),
        ({'see': 'Table 99'}, 'is no table of the paper'),
    ],
    ids=str,
)
def test_a_row_without_an_answer_is_named(answer: Any, message: str) -> None:
    rows = copy.deepcopy(ROWS)
    rows['SAGA']['tables']['Table 4']['rows']['without DWC'] = answer
    problems = list(papers.find_problems(rows, MODELS))
    assert any(p.startswith('SAGA, Table 4, without DWC: ') and message in p for p in problems)
    assert any('saga-swin-t-no-dwc' in p and 'stands in no row of it' in p for p in problems)


def test_configs_of_hosts_are_there() -> None:
    answers = [a for paper in ROWS.values() for t in paper['tables'].values() for a in t['rows'].values()]
    named = {tuple(answer.split('::')) for answer in answers if isinstance(answer, str) and '::' in answer}
    assert named
    for package, path in named:
        if available(package):
            configs = Path(__import__(package).__file__).parent / '.mim/configs'
            assert (configs / path).is_file(), path


ROWS_OF_PAPERS = {
    'PLuG': {1: 20, 3: 12, 9: 5},
    'M-DGSA': {1: 16},
    'Agent attention': {4: 12, 5: 10, 8: 5, 9: 5, 14: 33, 15: 24, 16: 8, 17: 14},
    'SAGA': {1: 31, 3: 13, 4: 4},
}


@pytest.mark.parametrize('paper', ROWS_OF_PAPERS)
def test_tables_have_as_many_rows_as_in_the_papers(paper: str) -> None:
    expected = ROWS_OF_PAPERS[paper]
    assert {table: len(ROWS[paper]['tables'][f'Table {table}']['rows']) for table in expected} == expected
