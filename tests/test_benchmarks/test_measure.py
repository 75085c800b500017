"""What a benchmark measures, and what it leaves out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mmgate.benchmarks import measure

FORWARD, BOTH = measure.MODES


def missing(*_: Tensor) -> Tensor:
    raise RuntimeError('no such kernel')


def test_peak_memory_sees_a_temporary() -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        return torch.ones(32 << 20).sum() + x  # 128 MiB

    _, peak = measure.measure(run, [torch.zeros(())], 'forward')
    assert 120 < peak / 2**20 < 200


def test_errors_are_relative_to_the_right_numbers() -> None:
    """And rounded inputs are part of them; a provider that fails has none."""
    providers = dict(missing=missing, right=torch.mul, off=lambda x, y: 1.001 * x * y, rounded=torch.mul)
    inputs = [torch.randn(50), torch.randn(50)]
    rows = measure.errors('op', providers, 'x', inputs, torch.mul, dict(rounded=torch.bfloat16))
    found = {row.provider: row.y_50 for row in rows}
    assert [*found] == ['right', 'off', 'rounded'] and found['right'] < 1
    assert found['off'] == pytest.approx(1000, rel=0.01) and found['rounded'] > 500


def test_what_does_not_run_is_left_out_and_said() -> None:
    inputs = ('x', [torch.ones(2)], BOTH, 1)
    with pytest.warns(UserWarning, match='missing is left out, forward.backward: RuntimeError: no such kernel'):
        rows = list(measure.interleaved('op', dict(missing=missing, plain=torch.square), *inputs))
    assert {row.provider for row in rows} == {'plain'} and rows[0].ratio_to_peer == 1
    with pytest.raises(
        RuntimeError, match='op: nothing runs here on x, forward.backward. missing: RuntimeError: no such kernel'
    ):
        list(measure.interleaved('op', dict(missing=missing), *inputs))


def test_inputs_have_the_providers_dtype_before_the_clock_starts() -> None:
    """So that rounding is not timed; whole numbers stay."""
    seen: dict[str, list[torch.dtype]] = {}

    def provider(name: str) -> Callable[[Tensor, Tensor], Tensor]:
        def run(x: Tensor, index: Tensor) -> Tensor:
            seen[name] = [x.dtype, index.dtype]
            return x.float()

        return run

    providers = dict(peer=provider('peer'), rounded=provider('rounded'))
    inputs = [torch.randn(3), torch.arange(3)]
    list(measure.interleaved('op', providers, 'x', inputs, 'forward', 1, dtypes=dict(rounded=torch.bfloat16)))
    assert seen == dict(peer=[torch.float32, torch.int64], rounded=[torch.bfloat16, torch.int64])


def test_a_table_of_times_divides_them_by_ours() -> None:
    """Quotients are those of the turns."""
    given = [  # input, mode, threads, provider, milliseconds, the peer's time over the provider's
        ('encoder', FORWARD, 1, 'peer', 30, 1.0),
        ('encoder', FORWARD, 1, 'slow', 60, 0.5),
        ('encoder', FORWARD, 1, 'ours', 10, 3.1),
        ('encoder', FORWARD, 2, 'peer', 15, 1.0),
        ('encoder', FORWARD, 2, 'slow', 20, 0.75),
        ('encoder', FORWARD, 2, 'ours', 5, 2.9),
        ('encoder', BOTH, 1, 'peer', 60, 1.0),
        ('encoder', BOTH, 1, 'ours', 30, 2.0),
        ('encoder', BOTH, 2, 'peer', 33, 1.0),
        ('encoder', BOTH, 2, 'ours', 15, 2.2),
    ]
    rows = [
        measure.Row('op', name, mode, 'time', 'ms', x, ms, ms, ms, ratio, f'{threads} threads', 'torch')
        for x, mode, threads, name, ms, ratio in given
    ]
    memory = replace(rows[2], metric='peak memory', y_50=1e6)
    assert measure.times_table([memory, *rows], 'ours').splitlines() == [
        'Times on 1 threads / 2 threads, in ms and divided by those of `ours`:',
        '',
        '| input | | `ours`, ms | peer | slow |',
        '|---|---|---|---|---|',
        '| encoder | forward | 10 / 5 | 3.10x / 2.90x | 6.20x / 3.87x |',
        '| encoder | forward+backward | 30 / 15 | 2.00x / 2.20x | - / - |',
    ]
    alone = [row for row in rows if row.provider != 'ours']
    assert measure.times_table(alone, 'ours').startswith('ours was not measured beside another provider')
