"""Gates drawn: the mean map, mean and spread of every layer, histogram."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from .figures import COLOURS, DIVERGING, LINE, diverging_limits, layer_labels, panels, save, wrap
from .gates import LayerGate, mean_map


def draw_gates(models: Sequence[tuple[str, Sequence[LayerGate]]], out: Path) -> Path:
    """Draw a row of three panels for each model; maps share a scale centred on 0. Return the path."""
    maps = [mean_map(gates) for _, gates in models]
    limit = diverging_limits(np.concatenate([[0.0], *(x[0].ravel() for x in maps if x is not None)]))
    tallest = max(len(gates) for _, gates in models)
    columns = 3 if any(maps) else 2  # gates of channels, as SAGA's, have no map
    figure, axes = panels(len(models), columns, height=max(2.3, 0.16 * tallest + 0.9))
    for (title, gates), found, (*lefts, middle, right) in zip(models, maps, axes, strict=True):
        title = wrap(title, LINE // columns)
        for left in lefts:
            if found is None:
                left.set_axis_off()
                left.set_title(title)
                text = 'no map: these gates\nare of channels'
                left.text(0.5, 0.5, text, ha='center', va='center', fontsize=8)
                continue
            coefficients, kind = found
            style = dict(cmap=DIVERGING, vmin=-limit, vmax=limit, interpolation='nearest', aspect='auto')
            image = left.imshow(coefficients, **style)
            bar = figure.colorbar(image, ax=left, shrink=0.9)
            bar.ax.tick_params(labelsize=7)
            across, down = dict(pairs=('key', 'query'), levels=('level', 'head'), heads=('head', 'layer'))[kind]
            left.set(xlabel=across, ylabel=down, title=f'{title}\nmean gate', xticks=[], yticks=[])
            if kind != 'pairs':
                left.set(xticks=range(coefficients.shape[1]), yticks=range(coefficients.shape[0]))
        places = np.arange(len(gates))
        means, spreads = ([getattr(g.statistics, a) for g in gates] for a in ('mean', 'deviation'))
        middle.axvline(0, color='0.6', linewidth=0.8)
        middle.errorbar(means, places, xerr=spreads, fmt='o', color=COLOURS[0], markersize=3.5, capsize=2, linewidth=1)
        labels = layer_labels([gate.path for gate in gates])
        names = [f'{a} {g.name[5:]}'.strip() for a, g in zip(labels, gates, strict=True)]
        middle.set_yticks(places, names, fontsize=6)
        middle.set(xlabel='gate, mean ± std', ylim=(len(gates) - 0.4, -0.6))
        middle.set_title('by layer' if lefts else f'{title}\nby layer')
        edges = gates[0].statistics.edges
        used: list[int] = []
        for number, kind in enumerate(dict.fromkeys(gate.name for gate in gates)):
            counts = np.sum([gate.statistics.histogram for gate in gates if gate.name == kind], axis=0)
            used.extend(np.flatnonzero(counts))
            style = dict(color=COLOURS[number], alpha=0.7, fill=True, label=kind)
            right.stairs(counts / max(counts.sum(), 1), edges, **style)
        if len({gate.name for gate in gates}) > 1:
            right.legend(fontsize=7)
        span = (edges[max(min(used) - 2, 0)], edges[min(max(used) + 3, len(edges) - 1)]) if used else (-1, 1)
        right.axvline(0, color='0.6', linewidth=0.8)
        beyond = any(abs(x) > edges[-1] for g in gates for x in (g.statistics.minimum, g.statistics.maximum))
        right.set(
            xlabel='gate (ends: beyond)' if beyond else 'gate',
            ylabel='share of values',
            xlim=span,
            title='histogram',
        )
    return save(figure, out)
