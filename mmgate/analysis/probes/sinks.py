"""Attention sinks: how much one token draws, and how large hidden states become."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from mmgate.analysis.figures.style import COLOURS, panels, save, short
from mmgate.analysis.loading import predict
from mmgate.analysis.probes.attention import GATES
from mmgate.analysis.probes.measures import key_shares
from mmgate.analysis.probes.recording import ACTIVATION, class_tokens, record
from mmgate.analysis.probes.statistics import RunningStatistics


@dataclass(frozen=True)
class LayerSink:
    """Of one layer, over images.

    Attributes:
        path: Of the attention.
        share: Of attention on its most attended key, mean over images; NaN without attention weights.
        head_share: That of the head in which it is largest: a sink of one head fades in the mean over heads.
        first: Share of attention on the first token, the class token, mean over heads and images: the study's
            first-token score; NaN in a layer without one.
        uniform: What a share would be if attention were uniform.
        activation: Largest absolute value of the hidden states after the layer; NaN where it is not known.
        first_activation: Likewise, of the first token alone.
        sparsity: Share of the gate's values near 0; NaN without a gate.

    Source: Gated attention for large language models, section 4.3.
    """

    path: str
    share: float
    head_share: float
    first: float
    uniform: float
    activation: float
    first_activation: float
    sparsity: float

    def row(self) -> dict[str, Any]:
        """Return the row of the CSV."""
        shares = dict(sink_share=self.share, largest_head_share=self.head_share, first_token_share=self.first)
        activations = dict(maximum_activation=self.activation, first_token_activation=self.first_activation)
        return dict(layer=self.path, **shares, uniform=self.uniform, **activations, gate_sparsity=self.sparsity)


class _Shares:
    """Of each forward pass the largest share of a key, that of the head where it is largest, and the first key's."""

    def __init__(self) -> None:
        self.rows: list[tuple[float, ...]] = []
        self.keys = 0

    def add(self, weights: Tensor) -> None:
        shares, self.keys = key_shares(weights), weights.shape[-1]
        mean = shares.mean(0)
        self.rows.append((float(mean.max()), float(shares.max()), float(mean[0]), 1 / self.keys))


class _Activations:
    """Largest finite absolute value, of all tokens and of the first."""

    def __init__(self) -> None:
        self.largest = self.first = 0.0

    def add(self, states: Tensor) -> None:
        sizes = states.float().abs().nan_to_num(0.0, 0.0)
        self.largest, self.first = max(self.largest, float(sizes.max())), max(self.first, float(sizes[:, 0].max()))


def sinks(model: nn.Module, batches: Iterable[dict[str, Any]]) -> list[LayerSink]:
    """Run a model over batches and return a figure for every attention with weights or a gate, as they run."""
    kinds: dict[str, Any] = dict({name: RunningStatistics for name in GATES}, attention=_Shares)
    kinds[ACTIVATION] = _Activations
    with record(model, kinds, accumulate=kinds) as recording:
        for batch in batches:
            predict(model, batch)
    extra = class_tokens(model, {path: of['attention'].keys for path, of in recording.items() if 'attention' in of})
    nan, found = float('nan'), []
    for path, readings in recording.items():
        shares, gates = readings.get('attention'), [readings[name] for name in GATES if name in readings]
        if shares is None and not gates:
            continue
        share, head, first, uniform = np.mean(shares.rows, 0).tolist() if shares else (nan,) * 4
        holder = next((p for p in _parents(path) if ACTIVATION in recording.get(p, {})), None)
        states = None if holder is None else recording[holder][ACTIVATION]
        found.append(
            LayerSink(
                path,
                share,
                head,
                first if path in extra else nan,
                uniform,
                states.largest if states else nan,
                states.first if states and path in extra else nan,
                float(np.mean([gate.sparsity for gate in gates])) if gates else nan,
            )
        )
    return found


def draw_sinks(models: list[tuple[str, list[LayerSink]]], out: Path) -> Path:
    """Draw shares, maximum activation and sparsity over the layers of each model; return the path.

    Empty markers are the first token's, where there is a class token. Attentions of another name (self- and
    cross-attention, of other keys) are curves of their own, in the order in which they run.
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
            of_first = {**style, 'markerfacecolor': 'white', 'linewidth': 0.7, 'label': f'{label}: first token'}
            if not np.isnan([layer.first for layer in alike]).all():
                left.plot(places, [layer.first for layer in alike], **of_first)
            activations = tuple(layer.activation for layer in alike)
            if activations not in drawn:  # self- and cross-attention of one layer
                middle.plot(places, activations, **style)
                middle.plot(places, [layer.first_activation for layer in alike], **of_first)
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
