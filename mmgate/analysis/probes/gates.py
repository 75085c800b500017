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
    """Statistics of one gate, and the sum of its maps; what their axes are follows from its shape.

    Args:
        pairs: Whether its last two axes are queries and keys.
    """

    def __init__(self, pairs: bool) -> None:
        self.statistics = RunningStatistics(bounds=(-4.0, 4.0), bins=2000)
        self.pairs, self.kind, self.count = pairs, '', 0
        self.maps: Tensor | float = 0.0

    def add(self, x: Tensor) -> None:
        self.statistics.add(x)
        if x.dim() == 5:  # deformable: (B, Q, H|1, L|1, P|1)
            self._add('levels', x.float().mean((0, 1, 4)))
        elif x.dim() == 4 and x.shape[-1] > 1 and self.pairs:
            self._add('pairs', F.adaptive_avg_pool2d(x.float().mean((0, 1))[None], SIDE)[0])
        elif x.dim() == 4 and x.shape[1] > 1 and not self.pairs:  # (B, H, N, d|1)
            self._add('heads', x.float().mean((0, 2, 3)))

    def _add(self, kind: str, x: Tensor) -> None:
        self.kind, self.maps, self.count = kind, self.maps + x.to('cpu', torch.float64), self.count + 1

    def mean(self) -> np.ndarray | None:
        return (self.maps / self.count).numpy() if isinstance(self.maps, Tensor) else None


def gate_statistics(model: nn.Module, batches: Iterable[dict[str, Any]]) -> list[LayerGate]:
    """Run a model over batches and return every gate that it has, in the order of the layers."""
    paired = {
        path
        for path, module in model.named_modules()
        if getattr(gate_of(module), 'gate_readings', {}).get('gate') == 'pairs'
    }
    with record(model, GATES, accumulate=lambda path, name: _Gate(path in paired)) as recording:
        for batch in batches:
            predict(model, batch)
    order = {path: number for number, (path, _) in enumerate(model.named_modules())}
    return [
        LayerGate(path, name, of.statistics, of.mean(), of.kind, _unchanged(model.get_submodule(path), name))
        for path in sorted(recording, key=order.__getitem__)
        for name, of in recording[path].items()
    ]


def _unchanged(module: Any, name: str) -> int | None:
    module = gate_of(module)
    module = getattr(module, 'attn', module)
    if hasattr(module, 'gml'):
        return 0 if module.residual else 1
    if hasattr(module, 'form'):
        return 1 if module.form == 'multiplicative' else 0
    return 1 if name != 'gate' else None  # K, V and the output are multiplied


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
