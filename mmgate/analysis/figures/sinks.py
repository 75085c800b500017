"""Attention sinks drawn over the layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from mmgate.analysis.figures.style import COLOURS, layer_axis, legend, panels, save, short


def draw_sinks(models: list[tuple[str, list[dict[str, Any]]]], out: Path) -> Path:
    """Draw shares, maximum activation and sparsity over the layers of each model; return the path.

    Empty markers are the first token's, where there is a class token. Attentions of another name (self- and
    cross-attention, of other keys) are curves of their own, in the order in which they run.

    Args:
        models: Their names and the rows of :func:`~mmgate.analysis.probes.sinks.sinks`.
        out: PNG to write.
    """
    figure, ((left, middle, right),) = panels(1, 3, height=2.9)
    for number, (name, layers) in enumerate(models):
        colour, drawn = COLOURS[number % len(COLOURS)], set[tuple[float, ...]]()
        kinds: dict[str, list[dict[str, Any]]] = {}
        for layer in layers:
            kinds.setdefault(_kind(layer['layer']), []).append(layer)
        for kind, (of, alike) in enumerate(kinds.items()):
            label = f'{short(name)}, {of}' if len(kinds) > 1 else short(name)
            style = dict(color=colour, marker='os^D'[kind % 4], markersize=3.5, linewidth=1.2, label=label)
            style['linestyle'] = ('-', '--', '-.', (0, (1, 1)))[kind % 4]
            of_first = {**style, 'markerfacecolor': 'white', 'linewidth': 0.7, 'label': f'{label}: first token'}
            found = {key: np.array([layer[key] for layer in alike]) for key in alike[0] if key != 'layer'}
            left.plot(found['sink_share'], **style)
            left.plot(found['uniform'], color=colour, linewidth=0.6, linestyle=':')
            if not np.isnan(found['first_token_share']).all():
                left.plot(found['first_token_share'], **of_first)
            activations = tuple(found['maximum_activation'])
            if activations not in drawn:  # self- and cross-attention of one layer
                middle.plot(activations, **style)
                middle.plot(found['first_token_activation'], **of_first)
                drawn.add(activations)
            if not np.isnan(found['gate_sparsity']).all():
                right.plot(found['gate_sparsity'], **style)
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
