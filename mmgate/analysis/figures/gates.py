"""Draw the values of a model's gates: as maps, as mean and spread of every layer, and as histograms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np

from mmgate.analysis.figures import style
from mmgate.analysis.probes.gates import EDGES, GateMap, LayerGate, mean_maps

BARS = 40  # of a histogram
SHORT = 20  # characters of a layer's name for which a panel has room
LONGEST = 80  # characters from which the middle of a layer's name is left out
MAP_INCHES = 1.5  # width of a map, about
MOST_DPI = 600
TITLE = 28  # characters of a line above the first panel
AXES = dict(pairs=' of pairs', levels=' of levels', heads=' of heads', channels=' of channels')
NOTE = (
    'Grey lines, white in maps: the value at which a gate leaves attention unchanged.\n'
    'By layer: bars are the standard deviation over all gates of the layer.'
)


def draw_gates(models: Sequence[tuple[str, Sequence[LayerGate]]], out: Path) -> Path:
    """Draw for each model the maps of its gates, the mean gate of every layer, and a histogram; return the file's path.

    The colours of a map are centred on the value at which its gates change nothing; maps of equal axes share a scale.
    Histograms count every layer alike, no matter how many values it has.
    """
    maps = [mean_maps(gates) for _, gates in models]
    drawn = [of_kind for found in maps for of_kind in found]
    used = _used([gate for _, gates in models for gate in gates])
    names = [_names(gates) for _, gates in models]
    # Gates of channels, as SAGA's, have no map.
    left = max(map(len, maps))
    columns = left + 2
    tallest = max(map(len, names))
    longest = max(len(name) for listed in names for name in listed)
    # Maps of heads have the layers' names beside them.
    by_head = len({number for found in maps for number, of_kind in enumerate(found) if of_kind.axes == 'heads'})
    width = style.WIDTH / 3 * max(columns, 3) + 0.05 * max(longest - SHORT, 0) * (1 + by_head)
    figure, axes = style.panels(len(models), columns, height=max(2.3, 0.16 * tallest + 0.9), width=width)
    for middle, right in axes[1:, -2:]:
        middle.sharex(axes[0, -2])
        right.sharex(axes[0, -1])
    for (title, gates), found, listed, (*lefts, middle, right) in zip(models, maps, names, axes, strict=True):
        _draw_layers(middle, gates, listed)
        _draw_histogram(right, gates, used)
        for axis in lefts[len(found) :]:
            axis.set_axis_off()
        for axis, of_kind in zip(lefts, found, strict=False):
            scale = (of_kind.axes, of_kind.unchanged)
            alike = [other.values for other in drawn if (other.axes, other.unchanged) == scale]
            _draw_map(figure, axis, of_kind, alike, [listed[gates.index(gate)] for gate in of_kind.gates])
        if lefts and not found:
            lefts[0].set_title('no map: these gates are of channels')
        first = (*lefts, middle)[0]
        first.set_title(f'{fill(title, TITLE)}\n{first.get_title()}')
    style.legend(figure, note=NOTE)
    cells = max((max(of_kind.values.shape) for of_kind in drawn), default=0)
    # Two pixels a cell show a diagonal.
    figure.set_dpi(min(cells / MAP_INCHES * 2, MOST_DPI))
    return style.save(figure, out)


def histogram_image(by_kind: Mapping[str, Sequence[LayerGate]]) -> np.ndarray:
    """Return a picture, RGB in uint8 ``(h, w, 3)``, with a histogram of the gates' values for each class of gates.

    Args:
        by_kind: Gates of layers, by the name of their class.
    """
    figure, (axes,) = style.panels(1, len(by_kind), height=2.4, width=3.2 * len(by_kind))
    for axis, (kind, gates) in zip(axes, by_kind.items(), strict=True):
        _draw_histogram(axis, gates, _used(gates))
        layers = len({gate.path for gate in gates})
        axis.set_title(f'{kind}, {layers} layer{"s" if layers > 1 else ""}', fontsize=9)
    figure.set_dpi(120)
    canvas: Any = figure.canvas
    canvas.draw()
    return np.ascontiguousarray(np.asarray(canvas.buffer_rgba())[..., :3])


def _names(gates: Sequence[LayerGate]) -> list[str]:
    """Return a label for each gate of a model: its layer's name, with ``k`` or the like where a layer has several."""
    layers = style.layer_labels([gate.path for gate in gates], length=LONGEST)
    names = [gate.name.removeprefix('gate').removeprefix('_') for gate in gates]
    return [f'{layer} {name}'.strip() for layer, name in zip(layers, names, strict=True)]


def _draw_map(figure: Any, axis: Any, of_kind: GateMap, alike: Sequence[np.ndarray], names: Sequence[str]) -> None:
    centre = of_kind.unchanged or 0
    limit = max(0.1, *(float(np.abs(values - centre).max()) for values in alike))
    look: dict[str, Any] = dict(cmap=style.DIVERGING, vmin=centre - limit, vmax=centre + limit)
    drawn = style.show_map(axis, _apart(of_kind), interpolation='nearest', aspect='auto', **look)
    style.colour_bar(figure, drawn, axis, shrink=0.9)
    across, down = dict(pairs=('key', 'query'), levels=('level', 'head'), heads=('head', 'layer'))[of_kind.axes]
    axis.set(xlabel=across, ylabel=down, xticks=[], yticks=[])
    if of_kind.axes != 'pairs':
        axis.set(xticks=range(of_kind.values.shape[1]), yticks=range(of_kind.values.shape[0]))
    if of_kind.axes == 'heads':
        axis.set_yticks(range(len(names)), names, fontsize=6)
    count = f'{len(names)} layer{"s" if len(names) > 1 else ""}'
    axis.set_title(f'mean {of_kind.name.replace("_", " ")} of {count}')
    if of_kind.class_tokens:
        axis.set(xlabel='key; left: class token', ylabel='query; top: class token')


def _apart(of_kind: GateMap) -> np.ndarray:
    """Return the values of a map for drawing, with class tokens' rows and columns widened and set apart by a gap."""
    values = of_kind.values
    count = of_kind.class_tokens
    if not count:
        return values
    broad = max(len(values) // 20, 1)
    gap = max(len(values) // 60, 1)
    for axis in (0, 1):
        of_class, of_image = np.split(values, [count], axis)
        empty = np.full_like(of_class.take([0], axis), np.nan).repeat(gap, axis)
        values = np.concatenate([of_class.repeat(broad, axis), empty, of_image], axis)
    return values


def _draw_layers(axis: Any, gates: Sequence[LayerGate], names: Sequence[str]) -> None:
    places = np.arange(len(gates))
    means = [gate.statistics.mean for gate in gates]
    spreads = [gate.statistics.deviation for gate in gates]
    neutral = [(gate.unchanged, place) for gate, place in zip(gates, places, strict=True) if gate.unchanged is not None]
    if neutral:
        axis.scatter(*zip(*neutral, strict=True), marker='|', s=120, color='0.6', linewidth=1, zorder=1)
    axis.errorbar(means, places, xerr=spreads, fmt='o', color=style.COLOURS[0], markersize=3.5, capsize=2, linewidth=1)
    axis.set_yticks(places, names, fontsize=6)
    axis.set(xlabel='gate, mean ± std', ylim=(len(gates) - 0.4, -0.6), title='by layer')


def _draw_histogram(axis: Any, gates: Sequence[LayerGate], used: tuple[float, float]) -> None:
    bins = np.searchsorted(EDGES, used)
    step = next(n for n in (1, 2, 4, 5, 10) if n * BARS >= bins[1] - bins[0])  # a bar begins at 0
    series: dict[tuple[str, float | None], list[np.ndarray]] = {}
    for gate in gates:
        label = f'{gate.name.replace("_", " ")}{AXES.get(gate.axes, "")}'
        counts = gate.statistics.histogram
        series.setdefault((label, gate.unchanged), []).append(counts / max(counts.sum(), 1))
    for number, ((label, _), of_one) in enumerate(series.items()):
        shares = np.add.reduceat(np.mean(of_one, axis=0), range(0, len(EDGES) - 1, step))
        look = dict(color=style.COLOURS[number], alpha=0.7, fill=number == 0, label=label, linewidth=1.2)
        axis.stairs(shares, EDGES[::step], **look)
    if len(series) > 1:
        axis.legend(fontsize=7)
    for neutral in {gate.unchanged for gate in gates} - {None}:
        axis.axvline(neutral, color='0.6', linewidth=0.8)
    axis.locator_params(axis='x', nbins=4)
    beyond = any(abs(x) > EDGES[-1] for g in gates for x in (g.statistics.minimum, g.statistics.maximum))
    label = 'gate (ends: beyond)' if beyond else 'gate'
    axis.set(xlabel=label, ylabel='share, mean of layers', title='histogram, all layers', xlim=used)


def _used(gates: Sequence[LayerGate]) -> tuple[float, float]:
    """Return the least and the largest value of the histograms' axis: the range of the values and a few bars more."""
    filled = np.flatnonzero(sum(gate.statistics.histogram for gate in gates))
    first, last = (filled[0], filled[-1]) if len(filled) else (0, len(EDGES))
    return EDGES[max(first - 4, 0)], EDGES[min(last + 5, len(EDGES) - 1)]
