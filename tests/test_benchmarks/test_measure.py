"""What a benchmark measures, and what it leaves out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mmgate.benchmarks import measure


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


def test_what_does_not_run_is_left_out_and_said() -> None:
    def missing(x: Tensor) -> Tensor:
        raise RuntimeError('no such kernel')

    inputs = ('x', [torch.ones(2)], measure.MODES[1], 1)
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

    inputs, dtypes = [torch.randn(3), torch.arange(3)], dict(rounded=torch.bfloat16)
    providers = dict(peer=provider('peer'), rounded=provider('rounded'))
    list(measure.interleaved('op', providers, 'x', inputs, 'forward', 1, dtypes=dtypes))
    assert seen == dict(peer=[torch.float32, torch.int64], rounded=[torch.bfloat16, torch.int64])
    seen.clear()
    rows = list(measure.errors('op', providers, 'x', inputs, lambda x, _: x, dtypes))
    assert seen['rounded'] == [torch.bfloat16, torch.int64]
    assert next(row.y_50 for row in rows if row.provider == 'rounded') > 500  # the rounding is part of the error


def test_a_table_of_times_ends_with_the_smallest_quotients() -> None:
    """Quotients are those of the turns, and the last line is of the first of the others alone."""

    forward, both = measure.MODES
    given = [  # input, mode, threads, provider, milliseconds, the peer's time over the provider's
        ('encoder', forward, 1, 'peer', 30, 1.0),
        ('encoder', forward, 1, 'slow', 60, 0.5),
        ('encoder', forward, 1, 'ours', 10, 3.1),
        ('encoder', forward, 2, 'peer', 15, 1.0),
        ('encoder', forward, 2, 'slow', 20, 0.75),
        ('encoder', forward, 2, 'ours', 5, 2.9),
        ('encoder', both, 1, 'peer', 60, 1.0),
        ('encoder', both, 1, 'ours', 30, 2.0),
        ('encoder', both, 2, 'peer', 33, 1.0),
        ('encoder', both, 2, 'ours', 15, 2.2),
        ('decoder', forward, 1, 'peer', 3, 1.0),
        ('decoder', forward, 1, 'ours', 1, 3.0),
        ('decoder', forward, 2, 'peer', 1.5, 1.0),
        ('decoder', forward, 2, 'ours', 0.5, 2.95),
    ]
    rows = [
        measure.Row('op', name, mode, 'time', 'ms', x, ms, ms, ms, ratio, f'{threads} threads', 'torch')
        for x, mode, threads, name, ms, ratio in given
    ]
    memory = replace(rows[2], metric='peak memory', y_50=1e6)
    table = measure.times_table([memory, *rows], 'ours').splitlines()
    assert table == [
        'Times on 1 threads / 2 threads, in ms and divided by those of `ours`:',
        '',
        '| input | | `ours`, ms | peer | slow |',
        '|---|---|---|---|---|',
        '| encoder | forward | 10 / 5 | 3.10x / 2.90x | 6.20x / 3.87x |',
        '| encoder | forward+backward | 30 / 15 | 2.00x / 2.20x | - / - |',
        '| decoder | forward | 1 / 0.5 | 3.00x / 2.95x | - / - |',
        '',
        'The smallest of peer: forward 2.90x (encoder, 2 threads), forward+backward 2.00x (encoder, 1 threads)',
    ]
    alone = [row for row in rows if row.provider != 'ours']
    assert measure.times_table(alone, 'ours').startswith('ours was not measured beside another provider')
