"""The rows of the benchmarks of operators, beside their peers."""

from __future__ import annotations

import csv
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import no_native, tool
from mmcv.ops import multi_scale_deform_attn
from torch import Tensor

from mmgate._environment import available
from mmgate.benchmarks import measure, ops
from mmgate.gates.gml import GatingModulation
from mmgate.ops import plug_attention
from mmgate.ops.deformable import offset_locations
from mmgate.ops.deformable import triton_deformable as sampler

# what is measured where it is there
NATIVE = () if no_native(torch.empty(0)) else ('native',)
PEER = ('torch-ms-deform-attn',) if available('torch_ms_deform_attn') else ()


@pytest.mark.parametrize(
    'benchmark, providers',
    [
        ('ms_deform_attn_on_cpu', (*PEER, 'mmcv', *NATIVE)),
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


@pytest.mark.skipif(not NATIVE, reason='the CPU kernel is not compiled')
def test_one_run_measures_one_thread_and_two(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And ends with the times over ours of both, and the smallest."""
    monkeypatch.setattr(ops, 'CPU_CASES', {'tiny': ([(4, 4), (2, 2)], 2, None, 8)})
    before = torch.get_num_threads()
    try:
        tool('benchmark_ops').main(['--repetitions', '1', '--out', str(tmp_path / 'bench.csv')])
    finally:
        torch.set_num_threads(before)
    with open(tmp_path / 'bench.csv') as file:
        devices = {row['device'].partition(', ')[2] for row in csv.DictReader(file)}
    assert devices == {'1 threads', '2 threads'}
    *_, row, _, smallest, _ = capsys.readouterr().out.splitlines()
    assert row.startswith('| tiny | forward+backward | ') and row.count(' / ') == 2 + len(PEER)
    assert smallest.startswith(f'The smallest of {(*PEER, "mmcv")[0]}: forward ')


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
    runs = ((ops._mmcv, None), (ops._attend, None), (ops._attend, torch.bfloat16))
    peer, ours, ours_16_bit = (
        measure.saved_bytes(partial(run, reference=reference), measure.cast(inputs, dtype)) for run, dtype in runs
    )
    assert ours < fp32 * peer and ours_16_bit < autocast * peer
