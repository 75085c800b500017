"""Accumulator of running statistics of recorded tensors, in constant memory."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

EDGES = np.linspace(-4, 4, 401)  # of histograms
NEAR_ZERO = 0.1  # a gate below it, in absolute value, counts as 0: closed, or, PLuG's, without effect


class RunningStatistics:
    """Accumulator of the mean, deviation, extremes and histogram of all recorded values, in constant memory.

    NaN and infinite values are left out. ``sparsity`` is the share of values below 0.1 in absolute value. Values
    outside of :data:`EDGES` count in the first and last bin of the histogram. ``distance`` is the mean distance of the
    values from ``centre``, :attr:`farthest` the largest.

    Args:
        centre: Value from which distances are measured; None measures none.
    """

    def __init__(self, centre: float | None = None) -> None:
        self.centre = centre
        self.histogram = np.zeros(len(EDGES) - 1, np.int64)
        self.count = 0
        self.mean = 0.0
        self.deviation = 0.0
        self.sparsity = 0.0
        self.distance = 0.0
        self.minimum = float('inf')
        self.maximum = float('-inf')

    def add(self, x: Tensor) -> None:
        """Add every value of a tensor to the statistics, in float64 by Chan's update of mean and variance."""
        x = x.detach().flatten().double()
        x = x[torch.isfinite(x)]
        if not x.numel():
            return
        total = self.count + x.numel()
        shift = float(x.mean()) - self.mean
        old = self.count / total
        new = x.numel() / total
        variance = old * self.deviation**2 + new * float(x.var(correction=0)) + old * new * shift**2
        self.deviation = variance**0.5
        self.count = total
        self.mean += shift * new
        self.sparsity = old * self.sparsity + new * float((x.abs() < NEAR_ZERO).double().mean())
        if self.centre is not None:
            self.distance = old * self.distance + new * float((x - self.centre).abs().mean())
        self.minimum = min(self.minimum, float(x.min()))
        self.maximum = max(self.maximum, float(x.max()))
        low = EDGES[0]
        high = EDGES[-1]
        bins = len(self.histogram)
        places = ((x.clamp(low, high) - low) / (high - low) * bins).long().clamp(max=bins - 1)
        self.histogram += torch.bincount(places, minlength=bins).cpu().numpy()

    @property
    def farthest(self) -> float:
        """The largest distance of any value so far from ``centre``; 0 without a centre, or before the first value."""
        if self.centre is None or not self.count:
            return 0.0
        return max(self.maximum - self.centre, self.centre - self.minimum)
