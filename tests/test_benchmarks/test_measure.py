"""What a benchmark measures, and what it leaves out."""

from __future__ import annotations

from collections.abc import Callable

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
