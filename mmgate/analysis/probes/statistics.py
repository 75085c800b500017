"""What a recording does with its tensors: keep them, or reduce them at once so that memory stays bounded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

NEAR_ZERO = 0.1  # a gate below it, in absolute value, counts as 0: closed, or, PLuG's, without effect


class Accumulator(Protocol):
    """Takes the tensors of one reading of one module, forward pass by forward pass."""

    def add(self, x: Tensor) -> None:
        """Take one tensor."""


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

    Not-a-number and infinite values are left out.

    Args:
        bounds: Of the histogram; what lies outside is counted in its first and last bin.
        bins: Of the histogram.
    """

    def __init__(self, *, bounds: tuple[float, float] = (-1.0, 1.0), bins: int = 80) -> None:
        self.edges = np.linspace(*bounds, bins + 1)
        self.histogram = np.zeros(bins, np.int64)
        self.count = self._zeros = 0
        self.mean = self._squares = 0.0
        self.minimum, self.maximum = float('inf'), float('-inf')

    def add(self, x: Tensor) -> None:
        """Take every number of ``x`` in (Chan's update of mean and variance, in float64)."""
        x = x.detach().flatten().float()
        finite = x[torch.isfinite(x)]
        if not finite.numel():
            return
        count, total = finite.numel(), self.count + finite.numel()
        mean = float(finite.mean(dtype=torch.float64))
        squares = float((finite.double() - mean).square().sum())
        self._squares += squares + (mean - self.mean) ** 2 * self.count * count / total
        self.mean += (mean - self.mean) * count / total
        self.count = total
        self.minimum, self.maximum = min(self.minimum, float(finite.min())), max(self.maximum, float(finite.max()))
        self._zeros += int((finite.abs() < NEAR_ZERO).sum())
        low, high, bins = float(self.edges[0]), float(self.edges[-1]), len(self.histogram)
        places = ((finite.clamp(low, high) - low) / (high - low) * bins).long().clamp(max=bins - 1)
        self.histogram += torch.bincount(places, minlength=bins).cpu().numpy()

    @property
    def deviation(self) -> float:
        """Standard deviation of the numbers met, 0 if there are none."""
        return (self._squares / self.count) ** 0.5 if self.count else 0.0

    @property
    def sparsity(self) -> float:
        """Share of the numbers below 0.1 in absolute value."""
        return self._zeros / self.count if self.count else 0.0
