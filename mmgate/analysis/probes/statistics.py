"""What becomes of tensors that a recording meets: kept, or reduced at once so that memory stays bounded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

NEAR_ZERO = 0.1  # a gate below it, in absolute value, counts as 0: closed, or, PLuG's, without effect


class Accumulator(Protocol):
    """Takes the tensors of a layer one forward pass after the other."""

    def add(self, x: Tensor) -> None:
        """Take one tensor."""


class Kept:
    """Keeps every tensor, on the CPU, in the order of the forward passes, in ``tensors``."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []

    def add(self, x: Tensor) -> None:
        """Keep a copy: the model may go on to write into its own."""
        self.tensors.append(x.detach().to('cpu', copy=True))


class RunningStatistics:
    """Count, mean, deviation, extremes, sparsity and histogram of all numbers met, in memory that does not grow.

    Not-a-number and infinite values are left out and counted in ``not_finite``.

    Args:
        bounds: Of the histogram; what lies outside is counted in its first and last bin.
        bins: Of the histogram.
        near_zero: Absolute value below which a number counts as zero in :attr:`sparsity`.
    """

    def __init__(
        self, *, bounds: tuple[float, float] = (-1.0, 1.0), bins: int = 80, near_zero: float = NEAR_ZERO
    ) -> None:
        self.edges, self.near_zero = np.linspace(*bounds, bins + 1), near_zero
        self.histogram = np.zeros(bins, np.int64)
        self.count = self.not_finite = self._zeros = 0
        self.mean = self._squares = 0.0
        self.minimum, self.maximum = float('inf'), float('-inf')

    def add(self, x: Tensor) -> None:
        """Take every number of ``x`` in (Chan's update of mean and variance, in float64)."""
        x = x.detach().flatten().float()
        finite = x[torch.isfinite(x)]
        self.not_finite += x.numel() - finite.numel()
        if not finite.numel():
            return
        count, total = finite.numel(), self.count + finite.numel()
        mean = float(finite.mean(dtype=torch.float64))
        squares = float((finite.double() - mean).square().sum())
        self._squares += squares + (mean - self.mean) ** 2 * self.count * count / total
        self.mean += (mean - self.mean) * count / total
        self.count = total
        low, high = float(self.edges[0]), float(self.edges[-1])
        self.minimum, self.maximum = min(self.minimum, float(finite.min())), max(self.maximum, float(finite.max()))
        self._zeros += int((finite.abs() < self.near_zero).sum())
        bins = len(self.histogram)
        places = ((finite.clamp(low, high) - low) / (high - low) * bins).long().clamp(max=bins - 1)
        self.histogram += torch.bincount(places, minlength=bins).cpu().numpy()

    @property
    def deviation(self) -> float:
        """Standard deviation of the numbers met, 0 if there are none."""
        return (self._squares / self.count) ** 0.5 if self.count else 0.0

    @property
    def sparsity(self) -> float:
        """Share of the numbers below ``near_zero`` in absolute value."""
        return self._zeros / self.count if self.count else 0.0


class RunningMean:
    """Elementwise mean over what was met, after ``reduce``, which has to give one shape for all of it.

    Args:
        reduce: Applied to every tensor first.
    """

    def __init__(self, reduce: Callable[[Tensor], Tensor] = lambda x: x.mean(0)) -> None:
        self.reduce, self.count = reduce, 0
        self._sum: Tensor | None = None

    def add(self, x: Tensor) -> None:
        """Take one tensor in.

        Raises:
            ValueError: Its reduced shape is not that of the others.
        """
        reduced = self.reduce(x.detach()).to('cpu', torch.float64)
        if self._sum is not None and self._sum.shape != reduced.shape:
            raise ValueError(
                f'maps of shape {tuple(self._sum.shape)} and {tuple(reduced.shape)} have no mean; give images of one '
                'size, or reduce the maps to one.'
            )
        self._sum = reduced if self._sum is None else self._sum + reduced
        self.count += 1

    @property
    def mean(self) -> Tensor:
        """The mean, float64 on the CPU.

        Raises:
            ValueError: Nothing was met.
        """
        if self._sum is None:
            raise ValueError('nothing was recorded, so there is no mean.')
        return self._sum / self.count
