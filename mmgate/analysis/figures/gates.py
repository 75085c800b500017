"""Gates drawn: the mean map, mean and spread of every layer, histogram."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np

from mmgate.analysis.figures import style
from mmgate.analysis.probes.gates import LayerGate, mean_map
from mmgate.analysis.probes.statistics import EDGES

BARS = 40  # of a histogram
MEANINGS = {
    0: 'A gate of 0 leaves attention unchanged (PLuG multiplies by 1 + gate).',
    1: 'A gate of 1 leaves attention unchanged, one of 0 closes it.',
    None: 'A gate of 0 is closed.',
}


def draw_gates(models: Sequence[tuple[str, Sequence[LayerGate]]], out: Path) -> Path:
    """Draw a row of three panels for each model, on the same axes; return the path.

    Maps have a scale centred on 0, which those of one kind share. Histograms count every layer alike, however many
    values it has.
    """
    maps = [mean_map(gates) for _, gates in models]
    used = _used([gate for _, gates in models for gate in gates])
    tallest = max(len(gates) for _, gates in models)
    columns = 3 if any(maps) else 2  # gates of channels, as SAGA's, have no map
    figure, axes = style.panels(len(models), columns, height=max(2.3, 0.16 * tallest + 0.9))
    for middle, right in axes[1:, -2:]:
        middle.sharex(axes[0, -2])
        right.sharex(axes[0, -1])
    for (title, gates), found, (*lefts, middle, right) in zip(models, maps, axes, strict=True):
        title = fill(title, style.LINE // columns)
        _draw_layers(middle, gates)
        middle.set_title('by layer' if lefts else f'{title}\nby layer')
        _draw_histogram(right, gates, used)
        if found is not None:
            alike = [other[0].ravel() for other in maps if other is not None and other[1] == found[1]]
            _draw_map(figure, lefts[0], *found, max(float(np.abs(np.concatenate(alike)).max()), 0.1))
            count = '' if found[1] == 'heads' else f', {sum(gate.kind == found[1] for gate in gates)} layers'
            lefts[0].set_title(f'{title}\nmean gate{count}')
        elif lefts:
            lefts[0].set_axis_off()
            lefts[0].set_title(f'{title}\nno map: these gates are of channels')
    notes = {title: ' '.join(dict.fromkeys(MEANINGS[gate.unchanged] for gate in gates)) for title, gates in models}
    if len(set(notes.values())) > 1:
        notes = {title: f'{title}: {note}' for title, note in notes.items()}
    style.legend(figure, note='\n'.join(dict.fromkeys(notes.values())))
    return style.save(figure, out)


def _draw_map(figure: Any, axis: Any, coefficients: np.ndarray, kind: str, limit: float) -> None:
    look: dict[str, Any] = dict(cmap=style.DIVERGING, vmin=-limit, vmax=limit, interpolation='nearest', aspect='auto')
    style.colour_bar(figure, style.show_map(axis, coefficients, **look), axis, shrink=0.9)
    across, down = dict(pairs=('key', 'query'), levels=('level', 'head'), heads=('head', 'layer'))[kind]
    axis.set(xlabel=across, ylabel=down, xticks=[], yticks=[])
    if kind != 'pairs':
        axis.set(xticks=range(coefficients.shape[1]), yticks=range(coefficients.shape[0]))


def _draw_layers(axis: Any, gates: Sequence[LayerGate]) -> None:
    places = np.arange(len(gates))
    means, spreads = ([getattr(gate.statistics, name) for gate in gates] for name in ('mean', 'deviation'))
    axis.axvline(0, color='0.6', linewidth=0.8)
    axis.errorbar(means, places, xerr=spreads, fmt='o', color=style.COLOURS[0], markersize=3.5, capsize=2, linewidth=1)
    labels = style.layer_labels([gate.path for gate in gates])
    names = [f'{label} {gate.name[5:]}'.strip() for label, gate in zip(labels, gates, strict=True)]
    axis.set_yticks(places, names, fontsize=6)
    axis.set(xlabel='gate, mean ± std', ylabel='layer', ylim=(len(gates) - 0.4, -0.6))


def _draw_histogram(axis: Any, gates: Sequence[LayerGate], used: tuple[float, float]) -> None:
    bins = np.searchsorted(EDGES, used)
    step = next(n for n in (1, 2, 4, 5, 10) if n * BARS >= bins[1] - bins[0])  # a bar begins at 0
    for number, name in enumerate(dict.fromkeys(gate.name for gate in gates)):
        of_name = [gate.statistics.histogram for gate in gates if gate.name == name]
        shares = np.mean([counts / max(counts.sum(), 1) for counts in of_name], axis=0)
        shares = np.add.reduceat(shares, range(0, len(shares), step))
        look = dict(color=style.COLOURS[number], alpha=0.7, fill=number == 0, label=name, linewidth=1.2)
        axis.stairs(shares, EDGES[::step], **look)
    if len({gate.name for gate in gates}) > 1:
        axis.legend(fontsize=7)
    axis.axvline(0, color='0.6', linewidth=0.8)
    axis.locator_params(axis='x', nbins=4)
    beyond = any(abs(x) > EDGES[-1] for g in gates for x in (g.statistics.minimum, g.statistics.maximum))
    label = 'gate (ends: beyond)' if beyond else 'gate'
    axis.set(xlabel=label, ylabel='share of a layer', title='histogram', xlim=used)


def _used(gates: Sequence[LayerGate]) -> tuple[float, float]:
    """Return where the histograms' axis begins and ends: some bars beyond those that hold values."""
    filled = np.flatnonzero(sum(gate.statistics.histogram for gate in gates))
    first, last = (filled[0], filled[-1]) if len(filled) else (0, len(EDGES))
    return EDGES[max(first - 4, 0)], EDGES[min(last + 5, len(EDGES) - 1)]
