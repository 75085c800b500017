"""Gates drawn: the mean map, mean and spread of every layer, histogram."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from .figures import COLOURS, DIVERGING, diverging_limits, panels, save, short
from .gates import LayerGate, mean_map


def draw_gates(models: Sequence[tuple[str, Sequence[LayerGate]]], out: Path) -> Path:
    """Draw a row of three panels for each model; maps share a scale centred on 0. Return the path."""
    maps = [mean_map(gates) for _, gates in models]
    limit = diverging_limits(np.concatenate([[0.0], *(x.ravel() for x in maps if x is not None)]))
    tallest = max(len(gates) for _, gates in models)
    figure, axes = panels(len(models), 3, height=max(2.3, 0.16 * tallest + 0.9))
    for (title, gates), coefficients, (left, middle, right) in zip(models, maps, axes, strict=True):
        if coefficients is None:
            left.set_axis_off()
            left.text(0.5, 0.5, 'no map: this gate has\nneither pairs nor levels', ha='center', va='center', fontsize=8)
        else:
            style = dict(cmap=DIVERGING, vmin=-limit, vmax=limit, interpolation='nearest', aspect='auto')
            image = left.imshow(coefficients, **style)
            bar = figure.colorbar(image, ax=left, shrink=0.9)
            bar.ax.tick_params(labelsize=7)
            if any(gate.kind == 'pairs' for gate in gates):
                left.set(xlabel='key', ylabel='query', xticks=[], yticks=[], title=f'{title}\nmean gate')
            else:
                left.set(xlabel='level', ylabel='head', title=f'{title}\nmean gate')
                left.set(xticks=range(coefficients.shape[1]), yticks=range(coefficients.shape[0]))
        places = np.arange(len(gates))
        means, spreads = ([getattr(g.statistics, a) for g in gates] for a in ('mean', 'deviation'))
        middle.axvline(0, color='0.6', linewidth=0.8)
        middle.errorbar(means, places, xerr=spreads, fmt='o', color=COLOURS[0], markersize=3.5, capsize=2, linewidth=1)
        names = [short(gate.path if gate.name == 'gate' else f'{gate.path} {gate.name[5:]}', 24) for gate in gates]
        middle.set_yticks(places, names, fontsize=6)
        middle.set(xlabel='gate, mean ± std', ylim=(len(gates) - 0.4, -0.6), title='by layer')
        counts = sum(gate.statistics.histogram for gate in gates)
        edges = gates[0].statistics.edges
        right.stairs(counts / max(counts.sum(), 1), edges, fill=True, color=COLOURS[0])
        used = np.flatnonzero(counts)
        span = (edges[max(used[0] - 2, 0)], edges[min(used[-1] + 3, len(edges) - 1)]) if len(used) else (-1, 1)
        right.axvline(0, color='0.6', linewidth=0.8)
        right.set(xlabel='gate', ylabel='share of values', xlim=span, title='histogram')
        for axis in (left, middle, right):
            axis.xaxis.label.set_fontsize(8)
            axis.yaxis.label.set_fontsize(8)
            axis.title.set_fontsize(9)
    return save(figure, out)
