"""What a benchmark measures and leaves out, and the rows of the benchmarks of operators beside their peers."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import no_native, tool
from torch import Tensor

from mmgate._environment import available
from mmgate.benchmarks import measure, ops
from mmgate.gates.plug import GatingModulation
from mmgate.ops import plug_attention
from mmgate.ops.deformable import offset_locations

# what is measured where it is there
NATIVE = () if no_native(torch.empty(0)) else ('native',)
PEER = ('torch-ms-deform-attn',) if available('torch_ms_deform_attn') else ()
METRICS = ('time', 'peak memory')
TINY = dict(levels=[(4, 4), (2, 2)], batch=2, queries=None, columns=2, dim=8, heads=1, points=1)


def missing(*_: Tensor) -> Tensor:
    raise RuntimeError('no such kernel')


def test_peak_memory_sees_a_temporary() -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        return torch.ones(32 << 20).sum() + x  # 128 MiB

    _, peak = measure.measure(run, [torch.zeros(())], 'forward')
    assert 120 < peak / 2**20 < 200


def test_what_does_not_run_is_left_out_and_said() -> None:
    inputs: Any = ('x', [torch.ones(2)], 'forward+backward', 1)
    with pytest.warns(UserWarning, match='missing is left out, forward.backward: RuntimeError: no such kernel'):
        rows = list(measure.interleaved('op', dict(missing=missing, plain=torch.square), *inputs))
    assert {row.provider for row in rows} == {'plain'} and rows[0].ratio_to_peer == 1
    said = 'op: nothing runs here on x, forward.backward. missing: RuntimeError: no such kernel'
    with pytest.raises(RuntimeError, match=said):
        list(measure.interleaved('op', dict(missing=missing), *inputs))


def test_inputs_have_the_providers_dtype_before_the_clock_starts() -> None:
    """So that rounding is not timed; whole numbers stay."""
    seen: list[tuple[torch.dtype, ...]] = []

    def run(x: Tensor, index: Tensor) -> Tensor:
        seen.append((x.dtype, index.dtype))
        return x

    inputs, dtypes = [torch.randn(3), torch.arange(3)], dict(rounded=torch.bfloat16)
    list(measure.interleaved('op', dict(peer=run, rounded=run), 'x', inputs, 'forward', 1, dtypes=dtypes))
    assert seen == [(torch.float32, torch.int64), (torch.bfloat16, torch.int64)] * 2


@pytest.mark.parametrize(
    'op, providers',
    [
        ('ms_deform_attn', (*PEER, 'mmcv', *NATIVE)),
        ('gated_layers', ('plain SDPA', 'SDPA gate', 'M-DGSA')),
        ('plug_attention', ('eager', *NATIVE, 'chunked', 'triton', 'ungated SDPA')),
    ],
)
@pytest.mark.filterwarnings('ignore:.* is left out:UserWarning')
def test_every_provider_is_measured_with_one_thread_and_with_two(
    op: str, providers: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ops, 'CASES', dict(cpu=dict(tiny=TINY)))
    monkeypatch.setattr(ops, 'DENSE_CASES', dict(cpu=[(16, torch.float32)]))
    monkeypatch.setattr(ops, '_flex', lambda gml: None)
    before = torch.get_num_threads()
    try:
        tool('benchmark_ops').main(['--op', op, '--repetitions', '2', '--out', str(tmp_path / 'out/bench.csv')])
    finally:
        torch.set_num_threads(before)
    with open(tmp_path / 'out/bench.csv') as file:
        rows = list(csv.DictReader(file))
    if 'triton' in providers and not any(row['provider'] == 'triton' for row in rows):
        providers = tuple(name for name in providers if name != 'triton')  # it is neither there nor interpreted
    threads = ['1 threads', '2 threads']
    assert [*dict.fromkeys(row['device'].partition(', ')[2] for row in rows)] == threads
    for number in threads:
        of_one = [row for row in rows if row['device'].endswith(number)]
        keys = [(name, mode, metric) for name in providers for mode in measure.MODES for metric in METRICS]
        assert sorted((row['provider'], row['mode'], row['metric']) for row in of_one) == sorted(keys)
        assert all(float(row['y_20']) <= float(row['y_50']) <= float(row['y_80']) for row in of_one)


@pytest.mark.filterwarnings('ignore:.* is left out:UserWarning')
def test_a_gpus_providers_are_measured_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 16 bits and without the gate; what is not installed is left out."""
    pytest.importorskip('triton', minversion='3.2')
    if torch.cuda.is_available():
        pytest.skip('the kernels are compiled here')
    sampler_inputs = ops.sampler_inputs
    monkeypatch.setattr(ops, 'CASES', dict(cuda=dict(tiny={**TINY, 'levels': [(2, 2)], 'batch': 1, 'dim': 32})))
    monkeypatch.setattr(ops, 'sampler_inputs', lambda device, **case: sampler_inputs(**case, device='cpu'))
    rows = list(ops.benchmark_ms_deform_attn(1))
    assert {'grid_sample', 'triton', 'triton, ungated', 'triton, bfloat16'} <= {row.provider for row in rows}
    assert all(row.y_50 > 0 for row in rows if row.metric == 'time')


@pytest.mark.slow  # as it is compiled
def test_flex_attention_is_a_peer_forward_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gml = GatingModulation('product', activation='tanh', init='paper')
    inputs = [torch.randn(2, heads, 24, 32) for heads in (4, 4, 4, 1, 1)]
    with torch.no_grad():
        torch.testing.assert_close(ops._flex(gml)(*inputs), plug_attention(*inputs, gml), rtol=1e-4, atol=1e-4)
    monkeypatch.setattr(ops, 'DENSE_CASES', dict(cpu=[(24, torch.float32)]))
    with pytest.warns(UserWarning, match='map is left out, forward.backward: NotImplementedError'):
        rows = list(ops.benchmark_plug_attention(1, device='cpu'))
    modes = {row.mode for row in rows if row.provider == 'FlexAttention and a map'}
    assert modes == {'forward'} and {row.mode for row in rows if row.provider == 'ungated SDPA'} == set(measure.MODES)


@pytest.mark.parametrize('columns', [2, 4], ids=['points', 'boxes'])
@pytest.mark.parametrize('distribution', ops.DISTRIBUTIONS)
def test_samples_lie_where_their_distribution_says(distribution: str, columns: int) -> None:
    inputs, reference = ops.sampler_inputs([(16, 20), (8, 10)], 2, 40, columns, 'cpu', distribution=distribution)
    locations = offset_locations(inputs[3], reference, inputs[1])
    around = (locations - reference[:, :, None, :, None, :2]) * inputs[1].flip(-1)[:, None]  # in pixels
    if distribution == 'spread':  # as any numbers between 0 and 1
        assert (locations.flatten(0, -2).std(0) - 12**-0.5).abs().max() < 0.01
    elif distribution == 'clustered':  # every sample has neighbours of other queries
        image = locations[0].reshape(-1, 2)
        assert torch.cdist(image, image).topk(20, largest=False).values[:, -1].max() < 0.1
    elif distribution == 'near':
        assert around.abs().mean() < 3
    elif columns == 2:
        assert around.abs().amax(-1).round().unique().tolist() == [1, 2, 3, 4]
