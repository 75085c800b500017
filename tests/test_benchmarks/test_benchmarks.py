"""The benchmarks' rows and pictures, and mmcv's operator compiled alone."""

from __future__ import annotations

import csv
import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import ROOT, no_native
from mmcv.ops import multi_scale_deform_attn
from mmengine.hub import get_config
from torch import Tensor

from mmgate._environment import available
from mmgate.benchmarks import measure, ops
from mmgate.benchmarks.training import benchmark_training, random_batch
from mmgate.layers.gml import GatingModulation
from mmgate.ops import plug_attention
from mmgate.ops.ms_deform_attn import offset_locations
from mmgate.ops.ms_deform_attn import triton as sampler

# what is measured where it is there
NATIVE = () if no_native(torch.empty(0)) else ('native',)
PEER = ('torch-ms-deform-attn',) if available('torch_ms_deform_attn') else ()


@pytest.mark.parametrize(
    'benchmark, providers',
    [
        ('ms_deform_attn_on_cpu', ('mmcv', 'cpu', *NATIVE, *PEER)),
        ('gated_layers', ('plain SDPA', 'SDPA gate', 'M-DGSA')),
    ],
)
def test_every_provider_is_measured(
    benchmark: str, providers: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    monkeypatch.setattr(ops, 'CPU_CASES', {'tiny': ([(4, 4), (2, 2)], 2, None, 8)})
    monkeypatch.setattr(ops, 'TOKENS', dict(cpu=(8,)))
    measured = getattr(ops, f'benchmark_{benchmark}')(repetitions=2)
    rows = measure.write_csv(measure.told(measured), tmp_path / 'out/bench.csv')
    metrics = ['time', 'peak memory']
    if benchmark == 'ms_deform_attn_on_cpu':
        metrics.append('error')
        first_time = next(i for i, row in enumerate(rows) if row.metric == 'time')
        assert {row.metric for row in rows[:first_time]} == {'error'}, 'errors come before times'
        assert all(row.y_50 < 10 for row in rows[:first_time]), 'float32 is off by millionths'
    keys = [(name, mode, metric) for name in providers for mode in measure.MODES for metric in metrics]
    assert sorted((row.provider, row.mode, row.metric) for row in rows) == sorted(keys)
    assert all(row.y_20 <= row.y_50 <= row.y_80 for row in rows)
    assert all(row.ratio_to_peer == 1 for row in rows if (row.provider, row.metric) == (providers[0], 'time'))
    with open(tmp_path / 'out/bench.csv') as file:
        assert [row['provider'] for row in csv.DictReader(file)] == [row.provider for row in rows]
    assert sum(line.startswith(rows[0].x) for line in capsys.readouterr().out.splitlines()) == len(rows)


@pytest.mark.slow  # as it is compiled
def test_flex_attention_is_a_peer_forward_on_a_cpu() -> None:
    gml = GatingModulation('product', activation='tanh', init='paper')
    inputs = [torch.randn(2, heads, 24, 32) for heads in (4, 4, 4, 1, 1)]
    with torch.no_grad():
        torch.testing.assert_close(ops._flex(gml)(*inputs), plug_attention(*inputs, gml), rtol=1e-4, atol=1e-4)
    with pytest.warns(UserWarning, match='map is left out, forward.backward: NotImplementedError'):
        rows = list(ops.benchmark_plug_attention(1, device='cpu', tokens=[24]))
    modes = {row.mode for row in rows if row.provider == 'FlexAttention and a map'}
    assert modes == {'forward'} and {row.mode for row in rows if row.provider == 'ungated SDPA'} == set(measure.MODES)


def test_peak_memory_sees_a_temporary() -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        return torch.ones(32 << 20).sum() + x  # 128 MiB

    _, peak = measure.measure(run, [torch.zeros(())], 'forward')
    assert 120 < peak / 2**20 < 200


def test_errors_are_relative_to_the_right_numbers() -> None:
    """Of the output by itself, of the gradients the largest; a provider that fails is left out with a warning."""

    def missing(x: Tensor, y: Tensor) -> Tensor:
        raise RuntimeError('no such kernel')

    providers = dict(
        missing=missing,
        right=lambda x, y: x * y,
        output_is_off=lambda x, y: x * y + 0.001 * (x * y).detach(),
        gradient_is_off=lambda x, y: 1.002 * x * y - 0.002 * x.detach() * y.detach(),
    )
    inputs = [torch.randn(50), torch.randn(50)]
    with pytest.warns(UserWarning, match='missing is left out, error: RuntimeError: no such kernel'):
        rows = list(measure.errors('op', providers, 'x', inputs, lambda x, y: x * y))
    found = {(row.provider, row.mode): row.y_50 for row in rows}
    forward, backward = measure.MODES
    assert found['right', forward] < 1
    assert found['right', backward] < 1
    assert found['output_is_off', forward] == pytest.approx(1000, rel=0.01)
    assert found['output_is_off', backward] < 1
    assert found['gradient_is_off', forward] < 1
    assert found['gradient_is_off', backward] == pytest.approx(2000, rel=0.01)
    assert len(found) == 6


@pytest.mark.parametrize('columns', [2, 4], ids=['points', 'boxes'])
@pytest.mark.parametrize('distribution', ops.DISTRIBUTIONS)
def test_samples_lie_where_their_distribution_says(distribution: str, columns: int) -> None:
    levels = [(16, 20), (8, 10)]
    inputs, reference = ops.sampler_inputs(levels, 2, 40, columns, 'cpu', distribution=distribution)
    locations = offset_locations(inputs[3], reference, inputs[1])
    around = (locations - reference[:, :, None, :, None, :2]) * inputs[1].flip(-1)[:, None]  # in pixels
    deviation = locations.flatten(0, -2).std(0)
    if distribution == 'spread':  # as any numbers between 0 and 1
        assert (deviation - 12**-0.5).abs().max() < 0.01
    if distribution == 'clustered':
        image = locations[0].reshape(-1, 2)
        nearest = torch.cdist(image, image).topk(20, largest=False).values[:, -1]
        assert nearest.max() < 0.1, 'every sample has neighbours of other queries'
    if distribution == 'near':
        assert around.abs().mean() < 3
    if distribution == 'grid' and columns == 2:
        assert around.abs().amax(-1).round().unique().tolist() == [1, 2, 3, 4]
    with pytest.raises(ValueError, match='choose one of near, grid'):
        ops.sampler_inputs(levels, 1, 3, columns, 'cpu', distribution='star')


def test_what_does_not_run_is_left_out_and_said() -> None:
    def missing(x: Tensor) -> Tensor:
        raise RuntimeError('no such kernel')

    inputs = ('x', [torch.ones(2)], measure.MODES[1], 1)
    with pytest.warns(UserWarning, match='missing is left out, forward.backward: RuntimeError: no such kernel'):
        rows = list(measure.interleaved('op', dict(missing=missing, plain=torch.square), *inputs))
    assert {row.provider for row in rows} == {'plain'} and rows[0].ratio_to_peer == 1
    with pytest.raises(RuntimeError, match='op: none of missing runs here on x, forward.backward'):
        list(measure.interleaved('op', dict(missing=missing), *inputs))


@pytest.mark.parametrize('case, fp32, autocast', [('encoder_b2', 0.9, 0.5), ('decoder900_b2', 1.0, 0.55)])
def test_bytes_kept_beside_mmcv(case: str, fp32: float, autocast: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """What each keeps for the backward pass does not depend on what its kernel computes, so none has to run."""
    pytest.importorskip('triton', minversion='3.2')
    monkeypatch.setenv('TRITON_INTERPRET', '1')
    monkeypatch.setattr(sampler, '_launch', lambda *_: None)

    def forward(value: Tensor, shapes: Tensor, start: Tensor, x: Tensor, weights: Tensor, im2col_step: int) -> Tensor:
        return value.new_zeros(len(value), weights.shape[1], value.shape[2:].numel())

    monkeypatch.setattr(multi_scale_deform_attn, 'ext_module', SimpleNamespace(ms_deform_attn_forward=forward))
    queries, columns = ops.QUERIES[case]
    levels = [(25, 42), (13, 21), (7, 11), (4, 6)] if queries is None else ops.LEVELS
    inputs, reference = ops.sampler_inputs(levels, 2, queries, columns, 'cpu')
    runs = (ops._mmcv, ops._attend, ops._in_bfloat16)
    peer, ours, ours_16_bit = (measure.saved_bytes(partial(run, reference=reference), inputs) for run in runs)
    assert ours < fp32 * peer and ours_16_bit < autocast * peer


@pytest.mark.parametrize(
    'config, op, backends',
    [
        ('plug/deformable_detr/plug-deformable-detr-refine_r18_1xb8-12e_shapes', 'ms_deform_attn', ('torch', 'cpu')),
        ('plug/mask2former/plug-mask2former_r18_1xb8-1k_shapes-128x128', 'plug_attention', ('torch',)),
        ('vanilla/mask_rcnn/mask-rcnn_pvt-demo_1xb8-8e_shapes', 'ms_deform_attn', ('auto',)),
    ],
    ids=['boxes', 'classes', 'masks'],
)
def test_training_benchmark(config: str, op: str, backends: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps run from a config's own losses and optimiser, and the environment is left as it was."""
    monkeypatch.setenv('MMGATE_MS_DEFORM_ATTN', 'torch')
    path = str(ROOT / f'configs/{config}.py')
    options = dict(op=op, backends=backends, size=(64, 96), batch=1, repetitions=1, device='cpu')
    rows = list(benchmark_training(path, path, **options))
    assert {row.provider.partition(', ')[2] for row in rows} == {'', *backends}
    assert {row.metric for row in rows} == {'time', 'throughput', 'peak memory'}
    times = {row.provider: row.y_50 for row in rows if row.metric == 'time'}
    images = {row.provider: row.y_50 for row in rows if row.metric == 'throughput'}
    assert images == pytest.approx({name: 1e3 / ms for name, ms in times.items()}, rel=1e-3, abs=1e-3)
    assert os.environ['MMGATE_MS_DEFORM_ATTN'] == 'torch' and 'MMGATE_PLUG_ATTENTION' not in os.environ


def test_mask2formers_classes_have_another_name() -> None:
    cfg = get_config('mmdet::mask2former/mask2former_r50_8xb2-lsj-50e_coco.py')
    (sample,) = random_batch(cfg, (64, 96), 1)['data_samples']
    assert 3 < sample.gt_instances.labels.max() < 80


def test_speedups_are_measured_alone_and_together(monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(ROOT / 'configs/plug/deformable_detr/plug-deformable-detr-refine_r18_1xb8-12e_shapes.py')
    compiled = []
    monkeypatch.setattr('mmgate.speed.hooks.CompileHook.before_train', lambda self, run: compiled.append(run))
    options = dict(size=(64, 96), batch=1, repetitions=1, device='cpu', processor_time=True)
    speedups = ('groups', 'matcher', 'all')
    rows = [r for r in benchmark_training(path, path, speedups=speedups, **options) if r.metric == 'time']
    assert [row.provider.partition(', ')[2] for row in rows] == ['', 'auto', *speedups]
    assert len(compiled) == 1 and all(row.y_50 > 0 for row in rows)
