"""What gates are: mean and spread a layer, histograms, mean maps over heads, layers and images."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .accumulators import RunningMean, RunningStatistics
from .probes import GATES, gate_of
from .recording import record
from .subjects import predict

SIDE = 64  # of the mean map of gates between queries and keys


@dataclass(frozen=True)
class LayerGate:
    """A gate over a data set.

    Attributes:
        path: Of the layer.
        name: Of the gate, one of :data:`~mmgate.analysis.probes.GATES`.
        statistics: Over all its values.
        coefficients: Its mean over images: ``(N, N)`` of queries and keys for dense gates, resized to 64 x 64,
            ``(H, L)`` for deformable ones, ``(H,)`` for those of a head's output or input, else None.
        kind: What the axes of ``coefficients`` are: ``'pairs'``, ``'levels'``, ``'heads'`` or ``''``.
    """

    path: str
    name: str
    statistics: RunningStatistics
    coefficients: np.ndarray | None
    kind: str

    def row(self) -> dict[str, Any]:
        """Return the row of the CSV."""
        found = self.statistics
        numbers = dict(mean=found.mean, std=found.deviation, minimum=found.minimum, maximum=found.maximum)
        return dict(layer=self.path, gate=self.name, **numbers, sparsity=found.sparsity, values=found.count)


class _Gate:
    """Statistics and mean map of one gate; what its axes are follows from its shape."""

    pairs = False  # whether its last two axes are queries and keys

    def __init__(self) -> None:
        self.statistics = RunningStatistics(bounds=(-4.0, 4.0), bins=2000)
        self.kind, self.mean = '', RunningMean(lambda x: x)

    def add(self, x: Tensor) -> None:
        self.statistics.add(x)
        if x.dim() == 5:  # deformable: (B, Q, H|1, L|1, P|1)
            self.kind = 'levels'
            self.mean.add(x.float().mean((0, 1, 4)))
        elif x.dim() == 4 and x.shape[-1] > 1 and self.pairs:
            self.kind = 'pairs'
            self.mean.add(F.adaptive_avg_pool2d(x.float().mean((0, 1))[None], SIDE)[0])
        elif x.dim() == 4 and x.shape[1] > 1 and not self.pairs:  # (B, H, N, d|1)
            self.kind = 'heads'
            self.mean.add(x.float().mean((0, 2, 3)))


class _PairGate(_Gate):
    pairs = True


def gate_statistics(model: nn.Module, batches: Iterable[dict[str, Any]]) -> list[LayerGate]:
    """Run a model over batches and return every gate that it has, in the order of the layers."""
    paired = {
        path
        for path, module in model.named_modules()
        if getattr(gate_of(module), 'gate_readings', {}).get('gate') == 'pairs'
    }
    with (
        record(model, GATES, accumulate=_Gate, paths=lambda p: p not in paired) as others,
        record(model, GATES, accumulate=_PairGate, paths=lambda p: p in paired) as pairs,
    ):
        for batch in batches:
            predict(model, batch)
    merged = {(path, name): found for path, of in {**others, **pairs}.items() for name, found in of.items()}
    order = {path: number for number, (path, _) in enumerate(model.named_modules())}
    return [
        LayerGate(path, name, found.statistics, found.mean.mean.numpy() if found.mean.count else None, found.kind)
        for (path, name), found in sorted(merged.items(), key=lambda item: order[item[0][0]])
    ]


def mean_map(gates: Iterable[LayerGate]) -> tuple[np.ndarray, str] | None:
    """Return the mean over layers of the maps of pairs, else of levels, or heads by layer, and which; None without any.

    Maps of another shape than the first one's (another number of heads or levels) are left out.
    """
    listed = list(gates)
    for kind in ('pairs', 'levels', 'heads'):
        maps = [torch.from_numpy(g.coefficients) for g in listed if g.kind == kind and g.coefficients is not None]
        maps = [x for x in maps if x.shape == maps[0].shape]
        if maps:
            stacked = torch.stack(maps)
            return (stacked if kind == 'heads' else stacked.mean(0)).numpy(), kind
    return None
