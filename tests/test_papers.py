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


@pytest.mark.parametrize(
    'answer, message',
    [
        (None, 'neither a config nor one of config, run, option, see, not'),
        ('plug-deit-t_8xb128-300e_in2k', 'is in no metafile'),
        ('elsewhere::plug/a.py', 'is no config of a host'),
        ({'not': ' '}, 'not is empty'),
        ({'run': 'python tools/analysis_tools/plot_nothing.py'}, 'plot_nothing.py is no file'),
        ({'run': 'python -m projects.dgsa.nothing run'}, 'projects/dgsa/nothing.py is no file'),
        ({'run': 'python -m projects.dgsa.study run --data imdb --width 2'}, 'unrecognized arguments: --width 2'),
        ({'run': 'python tools/analysis_tools/plot_cka.py CONFIG --out DIR'}, 'arguments are required: checkpoint'),
        pytest.param(
            {'run': 'python -m pytest projects/dgsa/tests -k table_99'},
            'table_99 plans no work',
            marks=pytest.mark.slow,  # a process, as one of the answers above
        ),
        ({'see': 'Table 99'}, 'is no table of the paper'),
        ({'option': 'as it is'}, "no figure: give what Table 4 prints, '-' for nothing"),
        ('saga-swin-t_8xb128-300e_in1k', 'no figure: give what Table 4 prints'),  # its own is of Table 1
    ],
    ids=str,
)
def test_a_row_without_an_answer_is_named(answer: Any, message: str) -> None:
    rows = copy.deepcopy(ROWS)
    rows['SAGA']['tables']['Table 4']['rows']['without DWC'] = answer
    problems = list(papers.find_problems(rows, MODELS))
    assert any(p.startswith('SAGA, Table 4, without DWC: ') and message in p for p in problems)
    assert any('saga-swin-t-no-dwc' in p and 'is in no row of it' in p for p in problems)


MASK2FORMER = 'mmseg::mask2former/mask2former_r50_8xb2-160k_ade20k-512x512.py'


@pytest.mark.parametrize(
    'paper, table, row, answer, message',
    [
        ('SAGA', 'Table 4', 'all', {'option': 'as it is', 'figure': {'mIoU': 83.0}}, 'a figure of mIoU'),
        ('SAGA', 'Table 4', 'all', 'saga-upernet_swin-t_8xb2-160k_ade20k-512x512', 'a model judged by mIoU'),
        (
            'Gated attention', 'Summary table', 'Baseline (dense 1.7B)', {'config': MASK2FORMER, 'figure': 6.18},
            'a model judged by mIoU, and the metric of Summary table is added million parameters, perplexity',
        ),
        (
            'SAGA', 'Table 4', 'without DWC', {'config': 'saga-swin-t-no-dwc_8xb128-300e_in1k', 'figure': 82.3},
            'Top 1 Accuracy 82.3, and 79.9 in the metafile',
        ),
        (
            'M-DGSA', 'Table 5', 'proj. x2, CIFAR-10', {'config': 'dgvit-x2_1xb128-100e_cifar10', 'figure': 5.35},
            'million parameters 5.35, and 3.77 in the metafile',
        ),
        ('M-DGSA', 'Section 5.1', 'DGViT, CIFAR-10', {'option': 'as it is', 'figure': 1}, 'Section 5.1 has no metric'),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 30 else '',
)  # fmt: skip
def test_a_wrong_figure_or_none_is_refused(paper: str, table: str, row: str, answer: Any, message: str) -> None:
    rows = copy.deepcopy(ROWS)
    rows[paper]['tables'][table]['rows'][row] = answer
    problems = list(papers.find_problems(rows, MODELS))
    assert any(p.startswith(f'{paper}, {table}, {row}: ') and message in p for p in problems), problems


def test_a_projects_readme_is_linked() -> None:
    rows = copy.deepcopy(ROWS)
    rows['SAGA']['project'] = 'projects/dgsa'
    assert 'configs/saga/README.md does not link projects/dgsa/README.md' in papers.find_problems(rows, MODELS)


@pytest.mark.parametrize('paper', ROWS)
def test_what_is_said_of_configs_is_said_of_some(paper: str) -> None:
    """Counts and patterns of recipes name configs that are in the paper's tables."""
    answers = [papers._answer(given) for table in ROWS[paper]['tables'].values() for given in table['rows'].values()]
    configs = {text for kind, text, _ in answers if kind == 'config'}
    assert set(ROWS[paper].get('counts', {})) <= configs
    for pattern in ROWS[paper].get('own_recipes', []):
        assert any(re.fullmatch(pattern, name) for name in configs)


@pytest.mark.parametrize('paper', ROWS)
def test_every_config_has_a_line(paper: str) -> None:
    page = papers.make_page({paper: ROWS[paper]}, MODELS)
    answers = [papers._answer(given) for table in ROWS[paper]['tables'].values() for given in table['rows'].values()]
    for name in {text for kind, text, _ in answers if kind == 'config' and text in MODELS}:
        assert f'](../{MODELS[name]["Config"]})' in page, name


ANSWERS = [a for paper in ROWS.values() for t in paper['tables'].values() for a in t['rows'].values()]
PLANNED = {answer['run'] for answer in ANSWERS if isinstance(answer, dict) and 'run' in answer}  # by find_problems
COMMANDS = set()
for readme in ROOT.glob('projects/*/README.md'):
    named = re.findall(r'^(?:\w+=\w+ )?(python -m projects\.[^#\n\\]*?) *(?:#.*)?$', readme.read_text(), re.M)
    COMMANDS |= {command for command in named if 'report --' not in command}  # that of a run of the reader's


@pytest.mark.parametrize('command', sorted(COMMANDS - PLANNED))
def test_a_command_has_work_to_do_in_a_fresh_checkout(command: str) -> None:
    """Scripts take the options that the projects' READMEs name, as those of the page, and not all is done already."""
    try:
        assert papers.plan(command)
    except ModuleNotFoundError as error:
        pytest.skip(str(error))


def test_a_plan_does_not_depend_on_earlier_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = tmp_path / 'work_dirs/results.csv'
    results.parent.mkdir()
    results.write_text((ROOT / 'projects/gated_lm/results.csv').read_text())
    monkeypatch.chdir(tmp_path)
    run = 'python -m projects.gated_lm.study run --variants none --out'
    assert len(papers.plan(f'{run} work_dirs/results.csv')) == 1
    assert papers.plan(f'{run} {results}') == []
    assert Path.cwd() == tmp_path


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
