"""What a benchmark measures, and what it leaves out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mmgate.benchmarks import measure


def test_peak_memory_sees_a_temporary() -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        return torch.ones(32 << 20).sum() + x  # 128 MiB

    _, peak = measure.measure(run, [torch.zeros(())], 'forward')
    assert 120 < peak / 2**20 < 200


def test_what_does_not_run_is_left_out_and_said() -> None:
    def missing(x: Tensor) -> Tensor:
        raise RuntimeError('no such kernel')

    inputs = ('x', [torch.ones(2)], measure.MODES[1], 1)
    with pytest.warns(UserWarning, match='missing is left out, forward.backward: RuntimeError: no such kernel'):
        rows = list(measure.interleaved('op', dict(missing=missing, plain=torch.square), *inputs))
    assert {row.provider for row in rows} == {'plain'} and rows[0].ratio_to_peer == 1
    with pytest.raises(RuntimeError, match='op: none of missing runs here on x, forward.backward'):
        list(measure.interleaved('op', dict(missing=missing), *inputs))
