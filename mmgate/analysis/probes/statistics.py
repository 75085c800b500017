"""What a recording does with its tensors: keep them, or reduce them at once so that memory stays bounded."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

EDGES = np.linspace(-4, 4, 401)  # of histograms
NEAR_ZERO = 0.1  # a gate below it, in absolute value, counts as 0: closed, or, PLuG's, without effect


class Kept:
    """Keeps every tensor on the CPU, in the order of the forward passes, in ``tensors``.

    Args:
        reduce: Applied to every tensor first.
    """

    def __init__(self, reduce: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        self.reduce = reduce
        self.tensors: list[Tensor] = []

    def add(self, x: Tensor) -> None:
        """Keep a copy: the model may go on to write into its own."""
        self.tensors.append(self.reduce(x.detach()).to('cpu', copy=True))

    @property
    def last(self) -> Tensor:
        """The tensor of the last forward pass."""
        return self.tensors[-1]


class RunningStatistics:
    """Count, mean, deviation, extremes, sparsity and histogram of all numbers met, in memory that does not grow.

    Not-a-number and infinite values are left out. ``sparsity`` is the share of the numbers below 0.1 in absolute value.
    What lies outside of :data:`EDGES` is counted in the histogram's first and last bin. ``distance`` is the mean
    distance of the numbers from ``centre``, :attr:`farthest` the largest.

    Args:
        centre: Where the distances begin; none are taken without it.
    """

    def __init__(self, centre: float | None = None) -> None:
        self.centre = centre
        self.histogram = np.zeros(len(EDGES) - 1, np.int64)
        self.count = 0
        self.mean = self.deviation = self.sparsity = self.distance = 0.0
        self.minimum, self.maximum = float('inf'), float('-inf')

    def add(self, x: Tensor) -> None:
        """Take every number of ``x`` in (Chan's update of mean and variance, in float64)."""
        x = x.detach().flatten().double()
        x = x[torch.isfinite(x)]
        if not x.numel():
            return
        total, shift = self.count + x.numel(), float(x.mean()) - self.mean
        old, new = self.count / total, x.numel() / total
        variance = old * self.deviation**2 + new * float(x.var(correction=0)) + old * new * shift**2
        self.deviation, self.count = variance**0.5, total
        self.mean += shift * new
        self.sparsity = old * self.sparsity + new * float((x.abs() < NEAR_ZERO).double().mean())
        if self.centre is not None:
            self.distance = old * self.distance + new * float((x - self.centre).abs().mean())
        self.minimum, self.maximum = min(self.minimum, float(x.min())), max(self.maximum, float(x.max()))
        low, high, bins = EDGES[0], EDGES[-1], len(self.histogram)
        places = ((x.clamp(low, high) - low) / (high - low) * bins).long().clamp(max=bins - 1)
        self.histogram += torch.bincount(places, minlength=bins).cpu().numpy()

    @property
    def farthest(self) -> float:
        """The largest distance of a number from ``centre``; 0 without one, or before the first number."""
        if self.centre is None or not self.count:
            return 0.0
        return max(self.maximum - self.centre, self.centre - self.minimum)
