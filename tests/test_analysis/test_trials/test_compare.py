"""Curves and final figures of runs, and the conclusions from their differences."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from conftest import tool
from helpers.runs import write_log
from scipy import stats

from mmgate.analysis.trials.compare import as_table, choose_metric, conclusions, paired_difference, read_run, summary
from mmgate.errors import ConfigError
from mmgate.mm import cli


def test_paired_difference_is_the_t_test() -> None:
    a, b = [0.5, 0.7, 0.4, 0.9], [0.4, 0.5, 0.45, 0.7]
    found, expected = paired_difference(a, b), stats.ttest_rel(a, b)
    interval = expected.confidence_interval()
    assert found['p'] == pytest.approx(expected.pvalue)
    assert (found['low'], found['high']) == pytest.approx((interval.low, interval.high))
    assert found['visible'] == pytest.approx((3.18245 + 0.97847) * np.std(np.subtract(a, b), ddof=1) / 2, rel=1e-4)
    for values, baseline in (([0.3, 0.2], [0.2, 0.1]), ([0.3], [0.2])):
        unknown = paired_difference(values, baseline)
        assert unknown.pop('difference') == pytest.approx(0.1) and np.isnan(list(unknown.values())).all()
    with pytest.raises(ValueError, match='2 and 1 values make no pairs'):
        paired_difference([1, 2], [1])


def test_comparisons_are_corrected_for_their_number() -> None:
    """Holm: 0.03 of three comparisons is doubled, and 0.04 is not below it."""
    known = dict(against='vanilla', difference=1.0, low=0.0, high=2.0, runs=3)
    rows = [dict(known, name=name, p=p) for name, p in (('a', 0.001), ('b', 0.04), ('c', 0.03), ('d', float('nan')))]
    first, *held, unknown = conclusions([dict(name='vanilla', against='-'), *rows])
    assert first == 'a against vanilla: a difference was shown, 1.000, 95 % interval 0.000 to 2.000.'
    assert all('no difference was shown once 3 comparisons are corrected for (Holm)' in said for said in held)
    assert unknown.endswith('no difference was shown; these seeds have no spread by which to judge 1.000.')


def test_a_resumed_run_is_one_curve(tmp_path: Path) -> None:
    write_log(tmp_path, {1: 0.1, 2: 0.2}, seed=1)
    write_log(tmp_path, {2: 0.3, 3: 0.4}, seed=2, stamp='20260102_000000')
    run = read_run(tmp_path)
    assert run.curves == {'coco/bbox_mAP': {1: 0.1, 2: 0.3, 3: 0.4}} and run.final('coco/bbox_mAP') == 0.4
    assert run.seed == 2 and run.seconds == pytest.approx(0.6) and run.memory == 120
    assert choose_metric([run]) == 'coco/bbox_mAP'
    with pytest.raises(ConfigError, match='the metric mIoU; they share coco/bbox_mAP'):
        choose_metric([run], 'mIoU')
    with pytest.raises(ConfigError, match='is no work dir of a run'):
        read_run(tmp_path / 'nothing')


def test_one_run_has_no_spread() -> None:
    table = as_table(summary(dict(vanilla=[0.4, 0.5], plug=[0.5, 0.7], single=[0.6]))).splitlines()
    assert table[-1] == '| single | 1 | 0.600 | - | - | - | - | - |' and 'nan' not in ''.join(table)


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
    assert [row['moved'] for row in rows] == ['', '0.02'] and rows[0]['seconds_per_step'] == '0.6'
