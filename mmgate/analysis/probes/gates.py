"""Compute statistics of gates over a data set: mean, spread and histogram of each layer, and mean maps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mmgate.analysis.probes.recording import class_tokens, predict
from mmgate.notes import GATES, Note
from mmgate.recording import record

EDGES = np.linspace(-4, 4, 401)  # of histograms
NEAR_ZERO = 0.1  # a gate below it, in absolute value, counts as 0: closed, or, PLuG's, without effect
# The mean map of a gate's values, by the axes along which they differ, which the gate notes with them.
MAPS = {
    'pairs': lambda x: x.mean((0, 1)),  # of (B, H|1, N, M)
    'levels': lambda x: x.mean((0, 1, 4)),  # of (B, Q, H|1, L|1, P|1)
    'heads': lambda x: x.mean((0, 2, 3)),  # of (B, H, N, d|1)
}


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
        low = float(EDGES[0])
        high = float(EDGES[-1])
        counts = torch.histc(x.clamp(low, high).cpu(), len(self.histogram), low, high)
        self.histogram += counts.long().numpy()


class LayerGate:
    """Statistics of one gate of one layer, gathered over the images of a data set.

    Args:
        first: The gate's first note.

    Attributes:
        path: Path of the layer.
        name: Name of the note.
        kind: Name of the gate's class.
        axes: The gate has a value for each of these: ``'pairs'``, ``'levels'``, ``'heads'``, or others without a map.
        unchanged: The value at which attention is as without the gate; None if there is none.
        statistics: Statistics over all values.
        class_tokens: Number of queries and keys before those of the image, where both are the same tokens.
    """

    class_tokens = 0

    def __init__(self, first: Note) -> None:
        self.path = first.path
        self.name = first.name
        self.kind = type(first.owner).__name__
        self.axes = first.axes
        self.unchanged = first.unchanged
        self.statistics = RunningStatistics(self.unchanged)
        self._num_points: Any = getattr(first.owner, 'num_points', 1)
        self._maps = torch.zeros(())  # sum over images
        self._count = 0

    def add(self, x: Tensor) -> None:
        """Add the gate's values of one forward pass to the statistics."""
        self.statistics.add(x)
        if self.axes == 'heads' and x.shape[1] == 1:  # one gate for all heads
            self.axes = ''
        if self.axes == 'levels' and x.dim() == 4:  # (B, Q, H|1, N|1), of levels with different numbers of points
            parts = x.split(list(self._num_points), 3) if x.shape[3] > 1 else [x]
            x = torch.stack([part.mean(3, keepdim=True) for part in parts], 3)
        if self.axes in MAPS:
            found = MAPS[self.axes](x.float()).to('cpu', torch.float64)
            if self._count == 0 or found.shape == self._maps.shape:
                self._maps = self._maps + found
                self._count += 1

    @property
    def coefficients(self) -> np.ndarray | None:
        """The gate's mean over images: by query and key ``(N, M)``, by head and level ``(H, L)``, or by head ``(H,)``.

        Images with another number of tokens than the first are left out of pairs. It is None where there is no map.
        """
        return (self._maps / self._count).numpy() if self._count else None

    def row(self) -> dict[str, Any]:
        """Return the layer's row for a CSV file.

        ``moved`` and ``moved_most`` are the mean and the largest distance from :attr:`unchanged`, the value at which
        the gate changes nothing.
        """
        found = self.statistics
        numbers = dict(mean=found.mean, std=found.deviation, minimum=found.minimum, maximum=found.maximum)
        known = self.unchanged is not None
        moved = dict(moved=found.distance if known else '', moved_most=found.farthest if known else '')
        return dict(layer=self.path, gate=self.name, **numbers, **moved, sparsity=found.sparsity, values=found.count)


@dataclass(frozen=True)
class GateMap:
    """The values of gates of several layers, averaged over heads, layers and images into one map for a figure.

    Attributes:
        values: The mean over images and layers: ``(N, M)`` for pairs of queries and keys, ``(H, L)`` for levels; for
            heads one row for each layer, ``(layers, H)``.
        gates: The gates of the layers.
        name, axes, unchanged, class_tokens: What the gates share, see :class:`LayerGate`.
    """

    values: np.ndarray
    gates: tuple[LayerGate, ...]
    name: str
    axes: str
    unchanged: float | None
    class_tokens: int

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield a row for a CSV file for each value of the map, with its query and key, level or head."""
        classes = [f'class {number}'.removesuffix(' 0') for number in range(self.class_tokens)]
        lines, columns = ([*classes, *range(length - self.class_tokens)] for length in self.values.shape)
        if self.axes == 'heads':
            lines = [gate.path for gate in self.gates]
        for (line, column), value in zip(np.ndindex(*self.values.shape), self.values.flat, strict=True):
            places = dict(row=lines[line], column=columns[column])
            yield dict(reading=self.name, axes=self.axes, layers=len(self.gates), **places, gate=float(value))


def gate_statistics(model: nn.Module, batches: Iterable[dict[str, Any]]) -> list[LayerGate]:
    """Run a model over batches and return the statistics of each of its gates, in the order of the layers."""
    with record(model, [GATES], accumulate=LayerGate) as recording:
        for batch in batches:
            predict(model, batch)
    order = [path for path, _ in model.named_modules()]
    found = [gate for path in sorted(recording, key=order.index) for gate in recording[path].values()]
    maps = {gate.path: gate.coefficients for gate in found if gate.axes == 'pairs'}
    extra = class_tokens(model, {path: len(x) for path, x in maps.items() if x is not None and len({*x.shape}) == 1})
    for gate in found:
        gate.class_tokens = extra.get(gate.path, 0)
    return found


def mean_maps(gates: Iterable[LayerGate]) -> list[GateMap]:
    """Average gates of several layers into maps for a figure; one map has gates of one name, axes and shape.

    They also share the value that changes nothing. Pairs come first, then levels, then heads. Gates without a map, such
    as those of channels, are left out.
    """
    alike: dict[tuple[Any, ...], list[tuple[np.ndarray, LayerGate]]] = {}
    for gate in gates:
        found = gate.coefficients
        if found is not None:
            key = (list(MAPS).index(gate.axes), gate.name, gate.unchanged, gate.class_tokens, found.shape)
            alike.setdefault(key, []).append((found, gate))
    maps = []
    for key in sorted(alike, key=lambda key: key[0]):
        values, listed = zip(*alike[key], strict=True)
        first = listed[0]
        mean = np.stack(values) if first.axes == 'heads' else np.mean(values, 0)
        maps.append(GateMap(mean, listed, first.name, first.axes, first.unchanged, first.class_tokens))
    return maps
