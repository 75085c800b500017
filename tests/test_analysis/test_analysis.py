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

from mmgate.analysis import benchmark, benchmark_cuda
from mmgate.analysis.backbone_benchmark import benchmark_backbones, draw_curves
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
    rows = list(getattr(benchmark, f'benchmark_{op}')(repetitions=1))
    assert {row.op for row in rows} == {op}
    assert all(row.ratio_to_peer == 1 for row in rows if row.provider == peer and row.metric == 'time')


def test_peak_memory_sees_a_temporary() -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        return torch.ones(32 << 20).sum() + x  # 128 MiB

    _, peak = benchmark.measure(run, [torch.zeros(())], 'forward')
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


@pytest.mark.skipif(torch.cuda.is_available(), reason='the kernels are compiled here; the benchmark itself runs them')
def test_gpu_benchmarks_in_the_interpreter() -> None:
    """Their plumbing: every provider is measured, and the kernel saves less than the eager form."""
    pytest.importorskip('triton')
    cases = dict(device='cpu', levels=[(3, 4), (2, 2)], queries={'encoder': None, 'decoder': 3})
    rows = list(benchmark_cuda.benchmark_ms_deform_attn(1, **cases))
    assert {r.provider for r in rows} == {'grid_sample', 'triton', 'triton, ungated', 'triton, bfloat16'}
    assert {r.metric for r in rows} == {'time', 'peak memory', 'saved'}
    small = dict(device='cpu', tokens=(24,), dtype=torch.float32, flex=False)
    dense = {(r.provider, r.metric): r.y_50 for r in benchmark_cuda.benchmark_plug_attention(1, **small)}
    assert dense['triton', 'saved'] < dense['eager', 'saved']


def test_backbone_benchmark_and_curves(tmp_path: Path) -> None:
    rows = list(benchmark_backbones('pvt-t', [32, 64], repetitions=1))
    assert {(r.x, r.mode, r.metric) for r in rows if r.provider == 'SAGA-PVT-T'} == {
        (x, mode, metric) for x in ('32_b1', '64_b1') for mode in benchmark.MODES for metric in ('time', 'peak memory')
    }
    picture = cv2.imread(str(draw_curves(rows, tmp_path / 'curves.png')))
    assert picture is not None and picture.std() > 5
