"""docs/papers.md answers every row of the five papers, and is what the metafiles say."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, tool

from mmgate._environment import available
from mmgate.tools.mm import find

papers = tool('papers', 'dev')
ROWS, MODELS = papers.read_rows(), papers.read_models()


def test_every_row_has_an_answer() -> None:
    assert list(papers.find_problems(ROWS, MODELS)) == []


def test_the_page_is_what_the_metafiles_say() -> None:
    assert (ROOT / 'docs/papers.md').read_text() == papers.make_page(ROWS, MODELS), 'python tools/dev/papers.py'


SAGA, DETAILS = ('SAGA', 'Table 4', 'without DWC'), ('M-DGSA', 'Table 5', 'proj. x2, CIFAR-10')


@pytest.mark.parametrize(
    'place, answer, message',
    [
        (SAGA, None, 'neither a config nor one of config, run, option, see, not'),
        (SAGA, 'plug-deit-t_8xb128-300e_in2k', 'is in no metafile'),
        (SAGA, 'elsewhere::plug/a.py', 'is no config of a host'),
        (SAGA, {'not': ' '}, 'not is empty'),
        (SAGA, {'run': 'python tools/analysis_tools/plot_nothing.py'}, 'plot_nothing is no file'),
        (SAGA, {'run': 'python -m projects.dgsa.study run --data imdb --width 2'}, 'unrecognized arguments: --width 2'),
        (
            SAGA,
            {'run': 'python -m pytest projects/dgsa/tests -k table_99'},
            'no test of projects/dgsa/tests has table_99',
        ),
        (SAGA, {'see': 'Table 99'}, 'is no table of the paper'),
        (SAGA, {'option': 'as it is'}, "no figure: give what Table 4 prints, '-' for nothing"),
        (SAGA, {'option': 'as it is', 'figure': {'mIoU': 83.0}}, 'a figure of mIoU'),
        (SAGA, {'config': 'saga-swin-t-no-dwc_8xb128-300e_in1k', 'figure': 82.3}, '82.3, and 79.9 in the metafile'),
        (DETAILS, {'config': 'dgvit-x2_1xb128-100e_cifar10', 'figure': 5.35}, '5.35, and 3.77 in the metafile'),
    ],
    ids=str,
)
def test_a_row_without_an_answer_or_with_a_wrong_figure_is_named(
    place: tuple[str, str, str], answer: Any, message: str
) -> None:
    paper, table, row = place
    rows = copy.deepcopy(ROWS)
    rows[paper]['tables'][table]['rows'][row] = answer
    problems = list(papers.find_problems(rows, MODELS))
    assert any(p.startswith(f'{paper}, {table}, {row}: ') and message in p for p in problems), problems


ANSWERS = [a for paper in ROWS.values() for t in paper['tables'].values() for a in t['rows'].values()]
COMMANDS = set()
for readme in ROOT.glob('projects/*/README.md'):
    COMMANDS |= set(re.findall(r'^(?:\w+=\w+ )?(python -m projects\.[^#\n\\]*?) *(?:#.*)?$', readme.read_text(), re.M))


@pytest.mark.parametrize('command', sorted(COMMANDS))
def test_a_command_of_a_project_is_one_that_its_script_takes(command: str) -> None:
    try:
        assert papers.parse(command)
    except ModuleNotFoundError as error:
        assert not str(error.name).startswith('projects'), error
        pytest.skip(str(error))


def test_mmdets_benchmark_is_found() -> None:
    """PLuG's Table 3 names it for the frames a second."""
    named = re.search(r'tools/mm.py (\S+) CONFIG (--\S+) inference', ROWS['PLuG']['tables']['Table 3']['note'])
    path = find(named[1])
    assert path.name == 'benchmark.py' and f"'{named[2]}'" in path.read_text()


def test_configs_of_hosts_are_there() -> None:
    configs = [a if isinstance(a, str) else a.get('config', '') for a in ANSWERS]
    named = {tuple(config.split('::')) for config in configs if '::' in config}
    assert named
    for package, path in named:
        if available(package):
            configs = Path(__import__(package).__file__).parent / '.mim/configs'
            assert (configs / path).is_file(), path
