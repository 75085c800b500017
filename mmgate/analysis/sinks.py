"""Attention sinks: how much one token draws, and how large hidden states become."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from .accumulators import RunningStatistics
from .figures import COLOURS, panels, save, short
from .maps import sink_share
from .probes import GATES
from .recording import ACTIVATION, record
from .subjects import predict


@dataclass(frozen=True)
class LayerSink:
    """Of one layer, over images.

    Attributes:
        path: Of the attention.
        share: Of attention on its most attended key, mean over images; NaN without attention weights.
        uniform: What the share would be if attention were uniform.
        activation: Largest absolute value of the hidden states after the layer; NaN where it is not known.
        sparsity: Share of the gate's values near 0; NaN without a gate.
    """

    path: str
    share: float
    uniform: float
    activation: float
    sparsity: float

    def row(self) -> dict[str, Any]:
        """Return the row of the CSV."""
        figures = dict(sink_share=self.share, uniform=self.uniform)
        return dict(layer=self.path, **figures, maximum_activation=self.activation, gate_sparsity=self.sparsity)


class _Shares:
    def __init__(self) -> None:
        self.shares: list[float] = []
        self.uniform: list[float] = []

    def add(self, weights: Tensor) -> None:
        self.shares.append(sink_share(weights)[0])
        self.uniform.append(1 / weights.shape[-1])


def sinks(model: nn.Module, batches: Iterable[dict[str, Any]]) -> list[LayerSink]:
    """Run a model over batches and return a figure for every attention with weights or a gate."""
    kinds: dict[str, Any] = dict(attention=_Shares, **{name: RunningStatistics for name in (*GATES, ACTIVATION)})
    with record(model, kinds, accumulate=kinds) as recording:
        for batch in batches:
            predict(model, batch)
    found = []
    for path, _ in model.named_modules():
        readings = recording.get(path, {})
        shares, gates = readings.get('attention'), [readings[name] for name in GATES if name in readings]
        if shares is None and not gates:
            continue
        holder = next((p for p in _parents(path) if ACTIVATION in recording.get(p, {})), None)
        states = recording[holder][ACTIVATION] if holder is not None else None
        found.append(
            LayerSink(
                path,
                float(np.mean(shares.shares)) if shares else float('nan'),
                float(np.mean(shares.uniform)) if shares else float('nan'),
                max(abs(states.minimum), abs(states.maximum)) if states else float('nan'),
                float(np.mean([gate.sparsity for gate in gates])) if gates else float('nan'),
            )
        )
    return found


def draw_sinks(models: list[tuple[str, list[LayerSink]]], out: Path) -> Path:
    """Draw share, maximum activation and sparsity over the layers of each model; return the path."""
    figure, ((left, middle, right),) = panels(1, 3, height=2.7)
    for number, (name, layers) in enumerate(models):
        colour, places = COLOURS[number % len(COLOURS)], np.arange(len(layers))
        style = dict(color=colour, marker='os^D'[number % 4], markersize=3.5, linewidth=1.2, label=short(name))
        left.plot(places, [layer.share for layer in layers], **style)
        left.plot(places, [layer.uniform for layer in layers], color=colour, linewidth=0.8, linestyle=':')
        middle.plot(places, [layer.activation for layer in layers], **style)
        sparse = [layer.sparsity for layer in layers]
        if not np.isnan(sparse).all():
            right.plot(places, sparse, **style)
    if not right.lines:
        right.text(0.5, 0.5, 'no gates', ha='center', va='center', transform=right.transAxes, fontsize=8)
    left.set(title='attention on the\nmost attended token', ylabel='share (dotted: uniform)')
    middle.set(title='maximum activation\nafter the layer')
    for axis in (left, middle):
        axis.update_datalim([(0, 0)])  # before the margins are chosen, so that they are of all that is shown
        axis.autoscale_view()
        axis.set_ylim(bottom=0)
    right.set(title='gate values near 0', ylim=(-0.03, 1.03), ylabel='share')
    for axis in (left, middle, right):
        axis.set_xlabel('layer')
        axis.grid(alpha=0.3)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc='outside lower center', ncols=2, fontsize=8, frameon=False)
    return save(figure, out)


def _parents(path: str) -> list[str]:
    names = path.split('.')
    return ['.'.join(names[:count]) for count in range(len(names) - 1, -1, -1)]
