"""What gates are: mean and spread a layer, histograms, mean maps over heads, layers and images."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmgate.analysis.probes.attention import GATES, gate_of
from mmgate.analysis.probes.recording import predict, record
from mmgate.analysis.probes.statistics import RunningStatistics

SIDE = 64  # of the mean map of gates between queries and keys
# what a gate's mean map over images is, by what the gate's class says that its values belong to
MAPS = {
    'pairs': lambda x: F.adaptive_avg_pool2d(x.mean((0, 1))[None], SIDE)[0],  # of (B, H|1, N, M)
    'levels': lambda x: x.mean((0, 1, 4)),  # of (B, Q, H|1, L|1, P|1)
    'heads': lambda x: x.mean((0, 2, 3)),  # of (B, H, N, d|1)
}


@dataclass(frozen=True)
class LayerGate:
    """A gate over a data set.

    Attributes:
        path: Of the layer.
        name: Of the gate, one of :data:`~mmgate.analysis.probes.attention.GATES`.
        statistics: Over all its values.
        coefficients: Its mean over images: ``(N, N)`` of queries and keys for dense gates, resized to 64 x 64,
            ``(H, L)`` for deformable ones, ``(H,)`` for those of a head's output or input, else None.
        kind: What the axes of ``coefficients`` are: ``'pairs'``, ``'levels'``, ``'heads'`` or ``''``.
        unchanged: The value at which attention is as without the gate; None if there is none.
    """

    path: str
    name: str
    statistics: RunningStatistics
    coefficients: np.ndarray | None
    kind: str
    unchanged: int | None = None

    def row(self) -> dict[str, Any]:
        """Return the row of the CSV."""
        found = self.statistics
        numbers = dict(mean=found.mean, std=found.deviation, minimum=found.minimum, maximum=found.maximum)
        return dict(layer=self.path, gate=self.name, **numbers, sparsity=found.sparsity, values=found.count)


class _Gate:
    """Statistics of one gate, and the sum of its maps."""

    def __init__(self, kind: str) -> None:
        self.statistics = RunningStatistics(bounds=(-4.0, 4.0), bins=2000)
        self.kind, self.count = kind, 0
        self.maps: Any = 0.0

    def add(self, x: Tensor) -> None:
        self.statistics.add(x)
        if self.kind == 'heads' and x.shape[1] == 1:  # shared by the heads
            self.kind = ''
        if self.kind in MAPS:
            self.maps, self.count = self.maps + MAPS[self.kind](x.float()).to('cpu', torch.float64), self.count + 1


def gate_statistics(model: nn.Module, batches: Iterable[dict[str, Any]]) -> list[LayerGate]:
    """Run a model over batches and return every gate that it has, in the order of the layers."""
    gates: dict[str, Any] = {path: gate_of(module) for path, module in model.named_modules()}
    with record(model, GATES, accumulate=lambda path, name: _Gate(gates[path].gate_readings[name])) as recording:
        for batch in batches:
            predict(model, batch)
    found = []
    for path in sorted(recording, key=list(gates).index):
        for name, of in recording[path].items():
            coefficients, kind = ((of.maps / of.count).numpy(), of.kind) if of.count else (None, '')
            found.append(LayerGate(path, name, of.statistics, coefficients, kind, _unchanged(gates[path], name)))
    return found


def _unchanged(gate: Any, name: str) -> int | None:
    if hasattr(gate, 'gml'):
        return 0 if gate.residual else 1
    if hasattr(gate, 'form'):
        return 1 if gate.form == 'multiplicative' else 0
    return 1 if name != 'gate' else None  # K, V and the output are multiplied


def mean_map(gates: Iterable[LayerGate]) -> tuple[np.ndarray, str] | None:
    """Return the mean over layers of the maps of pairs, else of levels, or heads by layer, and which; None without any.

    Maps of another shape than the first one's (another number of heads or levels) are left out.
    """
    listed = list(gates)
    for kind in MAPS:
        maps = [gate.coefficients for gate in listed if gate.kind == kind and gate.coefficients is not None]
        if maps:
            stacked = np.stack([x for x in maps if x.shape == maps[0].shape])
            return stacked if kind == 'heads' else stacked.mean(0), kind
    return None
