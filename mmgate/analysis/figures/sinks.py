"""Attention sinks drawn over the layers."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mmgate.analysis.figures.style import COLOURS, layer_axis, legend, panels, save, short
from mmgate.analysis.probes.sinks import LayerSink


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
            kinds.setdefault(_kind(layer.layer), []).append(layer)
        for kind, (of, alike) in enumerate(kinds.items()):
            places = np.arange(len(alike))
            label = f'{short(name)}, {of}' if len(kinds) > 1 else short(name)
            style = dict(color=colour, marker='os^D'[kind % 4], markersize=3.5, linewidth=1.2, label=label)
            style['linestyle'] = ('-', '--', '-.', (0, (1, 1)))[kind % 4]
            of_first = {**style, 'markerfacecolor': 'white', 'linewidth': 0.7, 'label': f'{label}: first token'}
            left.plot(places, [layer.sink_share for layer in alike], **style)
            left.plot(places, [layer.uniform for layer in alike], color=colour, linewidth=0.6, linestyle=':')
            if not np.isnan([layer.first_token_share for layer in alike]).all():
                left.plot(places, [layer.first_token_share for layer in alike], **of_first)
            activations = tuple(layer.maximum_activation for layer in alike)
            if activations not in drawn:  # self- and cross-attention of one layer
                middle.plot(places, activations, **style)
                middle.plot(places, [layer.first_token_activation for layer in alike], **of_first)
                drawn.add(activations)
            if not np.isnan([layer.gate_sparsity for layer in alike]).all():
                right.plot(places, [layer.gate_sparsity for layer in alike], **style)
    left.set(title='attention on the\nmost attended token', ylabel='share (dotted: uniform)')
    middle.set(title='maximum activation\nafter the layer')
    for axis in (left, middle):
        axis.update_datalim([(0, 0)])  # before the margins are chosen, so that they are of all that is shown
        axis.autoscale_view()
        axis.set_ylim(bottom=0)
    title = "gate near 0: of outputs, closed;\nPLuG's, without effect"
    right.set(title=title, ylim=(-0.03, 1.03), ylabel='share of values')
    for axis in (left, middle, right):
        layer_axis(axis)
    if not right.lines:
        right.text(0.5, 0.5, 'no gates', ha='center', va='center', transform=right.transAxes, fontsize=8)
        right.set(xticks=[], yticks=[], xlabel='', ylabel='')
    legend(figure, left.get_legend_handles_labels()[0])
    return save(figure, out)


def _kind(path: str) -> str:
    """Return what an attention is called in its layer, past the one that mmcv's attention wraps."""
    return next((name for name in reversed(path.split('.')) if name != 'attn' and not name.isdigit()), path)
