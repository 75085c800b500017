"""Draw measures layer by layer: attention sinks, ranks of linear attention, similarity of attention patterns."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np

from mmgate.analysis.figures import style

Rows = list[dict[str, Any]]
RANKS = (
    'Mean and standard deviation over heads and images. The effective rank counts singular values by their size:\n'
    'it is the exponential of the entropy of their shares.'
)


def draw_sinks(models: list[tuple[str, Rows]], out: Path) -> Path:
    """Draw over the layers of each model the attention on its sink, the largest activation, and the gates' sparsity.

    Empty markers are the first token's, where there is a class token. Attentions of different names, such as self- and
    cross-attention, get separate curves, in the order in which they run.

    Args:
        models: The name of each model, and its rows of :func:`~mmgate.analysis.probes.layers.sinks`.
        out: PNG to write.
    """
    figure, ((left, middle, right),) = style.panels(1, 3, height=2.9)
    for number, (name, layers) in enumerate(models):
        colour = style.COLOURS[number % len(style.COLOURS)]
        drawn: set[tuple[float, ...]] = set()
        kinds: dict[str, list[dict[str, Any]]] = {}
        for layer in layers:
            kinds.setdefault(_kind(layer['layer']), []).append(layer)
        for kind, (of, alike) in enumerate(kinds.items()):
            label = f'{style.short(name)}, {of}' if len(kinds) > 1 else style.short(name)
            look = dict(color=colour, marker='os^D'[kind % 4], markersize=3.5, linewidth=1.2, label=label)
            look['linestyle'] = ('-', '--', '-.', (0, (1, 1)))[kind % 4]
            of_first = {**look, 'markerfacecolor': 'white', 'linewidth': 0.7, 'label': f'{label}: first token'}
            found = {key: np.array([layer[key] for layer in alike]) for key in alike[0] if key != 'layer'}
            left.plot(found['sink_share'], **look)
            left.plot(found['uniform'], color=colour, linewidth=0.6, linestyle=':')
            if not np.isnan(found['first_token_share']).all():
                left.plot(found['first_token_share'], **of_first)
            activations = tuple(found['maximum_activation'])
            # Self- and cross-attention of one layer share its activations.
            if activations not in drawn:
                middle.plot(activations, **look)
                middle.plot(found['first_token_activation'], **of_first)
                drawn.add(activations)
            if not np.isnan(found['gate_sparsity']).all():
                right.plot(found['gate_sparsity'], **look)
    left.set(title='attention on the\nmost attended token', ylabel='share (dotted: uniform)')
    middle.set(title='maximum activation\nafter the layer')
    style.from_zero(left)
    style.from_zero(middle)
    title = "gate near 0: of outputs, closed;\nPLuG's, without effect"
    right.set(title=title, ylim=(-0.03, 1.03), ylabel='share of values')
    for axis in (left, middle, right):
        style.layer_axis(axis)
    if not right.lines:
        right.text(0.5, 0.5, 'no gates', ha='center', va='center', transform=right.transAxes, fontsize=8)
        right.set(xticks=[], yticks=[], xlabel='', ylabel='')
    style.legend(figure, left.get_legend_handles_labels()[0])
    return style.save(figure, out)


def _kind(path: str) -> str:
    """Return the last name in an attention's path that tells its role, such as ``self_attn``, for a figure's label."""
    return next((name for name in reversed(path.split('.')) if name != 'attn' and not name.isdigit()), path)


def draw_matrices(models: Sequence[tuple[str, Sequence[str], np.ndarray]], out: Path, *, label: str) -> Path:
    """Draw matrices of similarities (0 to 1) between layers, one panel for each model; return the file's path."""
    figure, axes = style.panels(1, len(models), height=2.9, width=3.6 * len(models) + 0.6)
    for axis, (title, paths, values) in zip(axes[0], models, strict=True):
        drawn = style.show_map(axis, values, cmap=style.SEQUENTIAL, vmin=0, vmax=1)
        numbers = range(len(paths))
        labels = [name if name == f'{n}' else f'{name}  {n}' for n, name in enumerate(style.layer_labels(paths))]
        axis.set_xticks(numbers, numbers, fontsize=6)
        axis.set_yticks(numbers, labels, fontsize=6)
        axis.set(title=fill(title, round(style.LINE * 0.55)), xlabel='layer')
    style.colour_bar(figure, drawn, axes, label)
    return style.save(figure, out)


def draw_ranks(models: Sequence[tuple[str, Sequence[dict[str, Any]]]], out: Path) -> Path:
    """Draw mean and spread of the rank of ``K^T V`` over the layers, a panel for each kind of rank; return the path."""
    figure, (axes,) = style.panels(1, 2, height=3.0)
    most = ', '.join(map(str, sorted({row['channels'] for _, rows in models for row in rows})))
    for axis, kind in zip(axes, ('matrix_rank', 'effective_rank'), strict=True):
        for number, (name, rows) in enumerate(models):
            means = [row[kind] for row in rows]
            spreads = [row[f'{kind}_std'] for row in rows]
            colour = style.COLOURS[number % len(style.COLOURS)]
            marker = 'os^D'[number % 4]
            look = dict(color=colour, marker=marker, markersize=4, capsize=2, linewidth=1.2)
            axis.errorbar(range(len(rows)), means, yerr=spreads, label=name, **look)
        axis.set(ylabel=f'{kind.replace("_", " ")} of $K^T V$\n(at most {most} and the number of tokens)')
        style.from_zero(axis)
        style.layer_axis(axis)
    handles = axes[0].get_legend_handles_labels()[0]
    style.legend(figure, handles, note=RANKS, columns=1 if len(models) < 4 else 2)
    return style.save(figure, out)
