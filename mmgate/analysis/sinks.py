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
        head_share: That of the head in which it is largest: a sink of one head fades in the mean over heads.
        uniform: What the share would be if attention were uniform.
        activation: Largest absolute value of the hidden states after the layer; NaN where it is not known.
        sparsity: Share of the gate's values near 0; NaN without a gate.
    """

    path: str
    share: float
    head_share: float
    uniform: float
    activation: float
    sparsity: float

    def row(self) -> dict[str, Any]:
        """Return the row of the CSV."""
        figures = dict(sink_share=self.share, largest_head_share=self.head_share, uniform=self.uniform)
        return dict(layer=self.path, **figures, maximum_activation=self.activation, gate_sparsity=self.sparsity)


class _Shares:
    def __init__(self) -> None:
        self.shares: list[float] = []
        self.of_heads: list[float] = []
        self.uniform: list[float] = []

    def add(self, weights: Tensor) -> None:
        self.shares.append(sink_share(weights)[0])
        self.of_heads.append(max(sink_share(weights[:, head : head + 1])[0] for head in range(weights.shape[1])))
        self.uniform.append(1 / weights.shape[-1])


def sinks(model: nn.Module, batches: Iterable[dict[str, Any]]) -> list[LayerSink]:
    """Run a model over batches and return a figure for every attention with weights or a gate, as they run."""
    kinds: dict[str, Any] = dict(attention=_Shares, **{name: RunningStatistics for name in (*GATES, ACTIVATION)})
    with record(model, kinds, accumulate=kinds) as recording:
        for batch in batches:
            predict(model, batch)
    found = []
    for path, readings in recording.items():
        shares, gates = readings.get('attention'), [readings[name] for name in GATES if name in readings]
        if shares is None and not gates:
            continue
        holder = next((p for p in _parents(path) if ACTIVATION in recording.get(p, {})), None)
        states = recording[holder][ACTIVATION] if holder is not None else None
        found.append(
            LayerSink(
                path,
                float(np.mean(shares.shares)) if shares else float('nan'),
                float(np.mean(shares.of_heads)) if shares else float('nan'),
                float(np.mean(shares.uniform)) if shares else float('nan'),
                max(abs(states.minimum), abs(states.maximum)) if states else float('nan'),
                float(np.mean([gate.sparsity for gate in gates])) if gates else float('nan'),
            )
        )
    return found


def draw_sinks(models: list[tuple[str, list[LayerSink]]], out: Path) -> Path:
    """Draw share, maximum activation and sparsity over the layers of each model; return the path.

    Attentions of another name (self- and cross-attention, of other keys) are curves of their own, in the order in which
    they run.
    """
    figure, ((left, middle, right),) = panels(1, 3, height=2.9)
    for number, (name, layers) in enumerate(models):
        colour, drawn = COLOURS[number % len(COLOURS)], set[tuple[float, ...]]()
        kinds: dict[str, list[LayerSink]] = {}
        for layer in layers:
            kinds.setdefault(_kind(layer.path), []).append(layer)
        for kind, (of, alike) in enumerate(kinds.items()):
            places = np.arange(len(alike))
            label = f'{short(name)}, {of}' if len(kinds) > 1 else short(name)
            style = dict(color=colour, marker='os^D'[kind % 4], markersize=3.5, linewidth=1.2, label=label)
            style['linestyle'] = ('-', '--', '-.', (0, (1, 1)))[kind % 4]
            left.plot(places, [layer.share for layer in alike], **style)
            left.plot(places, [layer.uniform for layer in alike], color=colour, linewidth=0.6, linestyle=':')
            activations = tuple(layer.activation for layer in alike)
            if activations not in drawn:  # self- and cross-attention of one layer
                middle.plot(places, activations, **style)
                drawn.add(activations)
            sparse = [layer.sparsity for layer in alike]
            if not np.isnan(sparse).all():
                right.plot(places, sparse, **style)
    left.set(title='attention on the\nmost attended token', ylabel='share (dotted: uniform)')
    middle.set(title='maximum activation\nafter the layer')
    for axis in (left, middle):
        axis.update_datalim([(0, 0)])  # before the margins are chosen, so that they are of all that is shown
        axis.autoscale_view()
        axis.set_ylim(bottom=0)
    right.set(
        title="gate near 0: of outputs, closed;\nPLuG's, without effect", ylim=(-0.03, 1.03), ylabel='share of values'
    )
    for axis in (left, middle, right):
        axis.set_xlabel('layer')
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(alpha=0.3)
    if not right.lines:
        right.text(0.5, 0.5, 'no gates', ha='center', va='center', transform=right.transAxes, fontsize=8)
        right.set(xticks=[], yticks=[], xlabel='', ylabel='')
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc='outside lower center', ncols=2, fontsize=7, frameon=False)
    return save(figure, out)


def _kind(path: str) -> str:
    """Return what an attention is called in its layer, past the one that mmcv's attention wraps."""
    return next((name for name in reversed(path.split('.')) if name != 'attn' and not name.isdigit()), path)


def _parents(path: str) -> list[str]:
    names = path.split('.')
    return ['.'.join(names[:count]) for count in range(len(names) - 1, -1, -1)]
