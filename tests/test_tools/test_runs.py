"""Curves and final figures of runs, and what is said of their differences."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from compare_runs import as_table, choose_metric, paired_difference, read_run, summary
from scipy import stats

from mmgate.errors import ConfigError


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


def write_log(folder: Path, stamp: str, values: dict[int, float]) -> None:
    log = folder / stamp / 'vis_data/scalars.json'
    log.parent.mkdir(parents=True)
    rows = [dict(loss=1.0, time=0.5, memory=100, step=1), dict(loss=0.5, time=0.7, memory=120, step=2)]
    rows += [{'coco/bbox_mAP': value, 'time': 9.0, 'step': step} for step, value in values.items()]
    rows.append({'gate/neck/mean': 0.5, 'step': 3})  # of GateStatisticsHook
    log.write_text('\n'.join(json.dumps(row) for row in rows) + '\n{"loss": 0.')  # killed as it wrote
    log.with_name('config.py').write_text(f'seeds = 3\nrandomness = dict(seed={stamp[7]})\nmodel = dict(type="X")\n')


def test_a_resumed_run_is_one_curve(tmp_path: Path) -> None:
    write_log(tmp_path, '20260101_000000', {1: 0.1, 2: 0.2})
    write_log(tmp_path, '20260102_000000', {2: 0.3, 3: 0.4})
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
