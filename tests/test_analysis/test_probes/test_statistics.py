"""Statistics of readings that are kept or summed up."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mmgate.analysis.probes.statistics import EDGES, RunningStatistics
from mmgate.notes import Kept


def test_running_statistics_are_numpys() -> None:
    """Over parts of any sizes, with values outside of the histogram and infinite ones."""
    rng = np.random.default_rng(0)
    parts = [rng.normal(0.3, 2.0, size) for size in (1, 100, 7)]
    numbers = np.concatenate(parts)
    statistics = RunningStatistics()
    for part in parts:
        statistics.add(torch.tensor(part))
    statistics.add(torch.tensor([float('nan'), float('inf')]))
    assert statistics.count == 108
    assert statistics.mean == pytest.approx(numbers.mean()) and statistics.deviation == pytest.approx(numbers.std())
    assert statistics.sparsity == pytest.approx((abs(numbers) < 0.1).mean())
    assert (statistics.minimum, statistics.maximum) == (numbers.min(), numbers.max())
    expected, _ = np.histogram(numbers.clip(-4, 4), EDGES)
    assert abs(statistics.histogram - expected).sum() <= 2  # a number on an edge


def test_kept_is_a_copy() -> None:
    kept, doubled, x = Kept(), Kept(lambda x: 2 * x), torch.ones(2)
    for each in (kept, doubled):
        each.add(x)
    x.zero_()
    assert kept.tensors[0].tolist() == [1, 1] and doubled.last.tolist() == [2, 2]
