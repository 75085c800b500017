"""Curves and final figures of runs, and what is said of their differences."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compare_runs import (
    as_table,
    choose_metric,
    draw_curves_of_runs,
    draw_differences,
    paired_difference,
    read_run,
    summary,
)
from conftest import tool
from helpers.runs import write_log
from scipy import stats

from mmgate.errors import ConfigError
from mmgate.mm import cli


def test_paired_difference_is_the_t_test() -> None:
    a, b = [0.5, 0.7, 0.4, 0.9], [0.4, 0.5, 0.45, 0.7]
    found, expected = paired_difference(a, b), stats.ttest_rel(a, b)
    interval = expected.confidence_interval()
    assert found['p'] == pytest.approx(expected.pvalue)
    assert (found['low'], found['high']) == pytest.approx((interval.low, interval.high))
    alike = paired_difference([0.3, 0.2], [0.2, 0.1])
    assert alike['difference'] == pytest.approx(0.1) and alike['standard_error'] == 0
    assert np.isnan([alike[key] for key in ('low', 'high', 'p')]).all()
    with pytest.raises(ValueError, match='2 and 1 values make no pairs'):
        paired_difference([1, 2], [1])


def test_a_resumed_run_is_one_curve(tmp_path: Path) -> None:
    write_log(tmp_path, {1: 0.1, 2: 0.2}, seed=1)
    write_log(tmp_path, {2: 0.3, 3: 0.4}, seed=2, stamp='20260102_000000')
    run = read_run(tmp_path)
    assert run.curves['coco/bbox_mAP'] == ([1, 2, 3], [0.1, 0.3, 0.4]) and run.final('coco/bbox_mAP') == 0.4
    assert run.seed == 2 and list(run.curves) == ['coco/bbox_mAP']
    assert run.seconds == pytest.approx(0.6) and run.memory == 120
    assert choose_metric([run]) == 'coco/bbox_mAP'
    with pytest.raises(ConfigError, match='the metric mIoU; they share coco/bbox_mAP'):
        choose_metric([run], 'mIoU')
    with pytest.raises(ConfigError, match='is no work dir of a run'):
        read_run(tmp_path / 'nothing')


def test_summary_says_what_one_run_cannot() -> None:
    rows = summary(dict(vanilla=[0.4, 0.5], plug=[0.5, 0.7], single=[0.6]))
    assert rows[1]['difference'] == pytest.approx(0.15) and np.isnan(rows[0]['difference'])
    table = as_table(rows).splitlines()
    assert table[-1] == '| single | 1 | 0.600 | - | - | - | - | - |' and 'nan' not in ''.join(table)


@pytest.mark.parametrize('steps', [(1,), (2, 4)], ids=['one validation', 'two'])
def test_runs_that_were_validated_once_have_no_curve(
    steps: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures: list[Any] = []
    monkeypatch.setattr('compare_runs.save', lambda figure, out: figures.append(figure))
    values = dict.fromkeys(steps, 0.3)
    groups = {name: [read_run(write_log(tmp_path / name / str(n), values)) for n in (0, 1)] for name in ('a', 'b')}
    draw_curves_of_runs(groups, 'coco/bbox_mAP', Path('x'), starts=dict(start=0.2))
    (axis,) = figures[0].axes
    if len(steps) == 1:
        assert [label.get_text() for label in axis.get_yticklabels()] == ['a (n = 2)', 'b (n = 2)']
        assert axis.lines[-1].get_xdata() == [0.2, 0.2]
    else:
        assert axis.get_xlim() == pytest.approx((1.9, 4.1)) and axis.lines[-1].get_ydata() == [0.2, 0.2]


@pytest.mark.parametrize('seeds', [1, 3])
def test_an_interval_is_explained_where_one_is_drawn(seeds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    monkeypatch.setattr('compare_runs.legend', lambda figure, *, note: notes.append(note))
    monkeypatch.setattr('compare_runs.save', lambda figure, out: out)
    draw_differences(dict(a=[0.1, 0.2, 0.3][:seeds], b=[0.2, 0.2, 0.5][:seeds]), {}, 'AP', Path('x'))
    assert ('interval' in notes[0]) == (seeds > 1)


@pytest.mark.parametrize(
    ('seeds', 'said'),
    [
        ((0, 1, 0, 1), ''),
        ((0, 1, 1, 2), 'the seeds of a are [0, 1], those of b [1, 2]'),
        ((0, 1, 0), 'lr=0.1 has 1 runs and a 2'),
    ],
    ids=['paired', 'other seeds', 'fewer'],
)
def test_compare_runs_pairs_seeds(
    seeds: tuple[int, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = zip(('0', '1', 'lr=0.1', '3'), seeds, (30.0, 40.0, 32.0, 43.0), strict=False)
    folders = [str(write_log(tmp_path / name, {1: value}, seed=seed)) for name, seed, value in runs]
    groups = [f'a={",".join(folders[:2])}', folders[2] if len(seeds) == 3 else f'b={",".join(folders[2:])}']
    assert cli.main(tool('compare_runs').main, [*groups, '--out', str(tmp_path / 'out')]) == 0
    printed = capsys.readouterr()
    assert said in printed.err if said else 'warning' not in printed.err
    if len(seeds) == 4:
        assert '| b | 2 | 37.500 | 7.778 | a | 2.500 | -3.853 to 8.853 | 0.126 |' in printed.out
    assert cli.main(tool('compare_runs').main, [f'a={folders[0]},{folders[0]}', '--out', 'x']) == 2
    assert 'given twice' in capsys.readouterr().err


def test_a_vanilla_run_is_compared_with_a_gated_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The gated run alone has the distances of gates, in its log and so in the table."""
    vanilla, gated = (write_log(tmp_path / name, {1: 0.3}) for name in ('vanilla', 'gated'))
    (log,) = gated.glob('*/vis_data/scalars.json')
    log.write_text('{"gate/neck/moved": 0.02, "gate/neck/moved_most": 0.3, "step": 3}\n' + log.read_text())
    arguments = [f'vanilla={vanilla}', f'gated={gated}', '--out', str(tmp_path / 'out')]
    assert cli.main(tool('compare_runs').main, arguments) == 0
    assert '0.02 (0.3) |' in capsys.readouterr().out
    rows = list(csv.DictReader((tmp_path / 'out/runs.csv').open()))
    assert [row['moved'] for row in rows] == ['', '0.02']
