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
    values from ``centre``, ``farthest`` the largest.

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
        self.farthest = 0.0
        self.minimum = float('inf')
        self.maximum = float('-inf')

    def add(self, x: Tensor) -> None:
        """Add every value of a tensor to the statistics, in float64 by Chan's update of mean and variance."""
        x = x.detach().flatten().double()
        x = x[torch.isfinite(x)]
        if not x.numel():
            return
        self.count += x.numel()
        new = x.numel() / self.count
        old = 1 - new
        shift = float(x.mean()) - self.mean
        variance = old * self.deviation**2 + new * float(x.var(correction=0)) + old * new * shift**2
        self.deviation = variance**0.5
        self.mean += shift * new
        self.sparsity = old * self.sparsity + new * float((x.abs() < NEAR_ZERO).double().mean())
        if self.centre is not None:
            distances = (x - self.centre).abs()
            self.distance = old * self.distance + new * float(distances.mean())
            self.farthest = max(self.farthest, float(distances.max()))
        self.minimum = min(self.minimum, float(x.min()))
        self.maximum = max(self.maximum, float(x.max()))
        low, high = EDGES[[0, -1]].tolist()
        counts = torch.histc(x.clamp(low, high).cpu(), len(self.histogram), low, high)
        self.histogram += counts.long().numpy()
