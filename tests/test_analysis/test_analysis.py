"""The benchmark's rows and the picture of predictions."""

from __future__ import annotations

import csv
from copy import deepcopy
from pathlib import Path

import cv2
import pytest
import torch
from conftest import ROOT
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
from mmengine.runner import save_checkpoint

from mmgate.analysis import benchmark
from mmgate.analysis.predictions import draw_predictions
from mmgate.datasets.shapes import write_shapes


def test_benchmark_measures_every_provider(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(benchmark, 'LEVELS', {'tiny': ([(4, 4), (2, 2)], 2)})
    monkeypatch.setenv('MMGATE_CPU_COMPILE', '0')  # restored afterwards
    rows = list(benchmark.benchmark_ms_deform_attn(repetitions=2))
    assert {(r.provider, r.mode, r.metric) for r in rows} == {
        (provider, mode, metric)
        for provider in ('mmcv', 'torch', 'cpu', 'cpu, compiled')
        for mode in benchmark.MODES
        for metric in ('time', 'peak memory')
    }
    assert all(r.y_20 <= r.y_50 <= r.y_80 for r in rows)
    benchmark.write_csv(rows, tmp_path / 'out/bench.csv')
    with open(tmp_path / 'out/bench.csv') as file:
        assert len(list(csv.DictReader(file))) == len(rows)


@pytest.mark.parametrize('op, peer', [('plug_attention', 'eager'), ('gated_layers', 'plain SDPA')])
def test_dense_benchmarks_run(monkeypatch: pytest.MonkeyPatch, op: str, peer: str) -> None:
    monkeypatch.setattr(benchmark, 'TOKENS', (8,))
    monkeypatch.setenv('MMGATE_CPU_COMPILE', '0')
    rows = list(benchmark.BENCHMARKS[op, 'cpu'](repetitions=1))
    assert {row.op for row in rows} == {op}
    assert all(row.ratio_to_peer == 1 for row in rows if row.provider == peer and row.metric == 'time')


def test_peak_memory_sees_a_temporary() -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        return torch.ones(32 << 20).sum() + x  # 128 MiB

    _, peak = benchmark._measure(run, [torch.zeros(())], 'forward')
    assert 120 < peak / 2**20 < 200


def test_predictions_picture(tmp_path: Path) -> None:
    cfg = Config.fromfile(ROOT / 'configs/plug/deformable_detr/plug-deformable-detr-refine_r18_1xb8-12e_shapes.py')
    write_shapes(tmp_path / 'shapes', num_train=1, num_val=3, size=64)
    cfg.test_dataloader.dataset.data_root = str(tmp_path / 'shapes')
    init_default_scope('mmdet')
    model = MODELS.build(deepcopy(cfg.model))
    save_checkpoint({'state_dict': model.state_dict()}, str(tmp_path / 'x.pth'))
    out = draw_predictions(cfg, str(tmp_path / 'x.pth'), tmp_path / 'new/p.png', images=8, columns=2)
    assert cv2.imread(str(out)).shape == (768, 768, 3)
