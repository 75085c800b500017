"""Measure time and peak memory of backbones at several image sizes in one run, and draw them as curves."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
from torch import Tensor, nn

from mmgate.analysis.figures.style import COLOURS, legend, panels, save
from mmgate.errors import ConfigError
from mmgate.mm.config_file import package_of

from .measure import MODES, Row, interleaved

Accuracy = tuple[float, str]  # accuracy, and family of the model or ''


def read_accuracies(path: Path, names: Iterable[str]) -> dict[str, Accuracy]:
    """Return the accuracies in a CSV file, by the names of the configs.

    Raises:
        ConfigError: The file cannot be read, lacks a column or one of the ``names``, or has a value that is no number.
    """
    try:
        with path.open(newline='') as file:
            rows = list(csv.DictReader(file))
        found = {Path(row['config']).name.removesuffix('.py'): row for row in rows}
        accuracies = {name: (float(row['accuracy']), row.get('family') or '') for name, row in found.items()}
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f'{path} is no CSV file with columns config and accuracy, a number: {error!r}.') from error
    missing = [name for name in names if name not in accuracies]
    if missing:
        raise ConfigError(f'{path} has no accuracy of {", ".join(missing)}; add a row for each.')
    return accuracies


def backbone(cfg: Config) -> nn.Module:
    """Return a config's backbone with the gates of its rules, without downloading weights."""
    init_default_scope(package_of(cfg) or 'mmdet')
    model = deepcopy(cfg.model)
    if model.get('backbone') is None:
        raise ConfigError(f'{cfg.filename} has no model.backbone.')
    model.backbone.init_cfg = None
    built: nn.Module = MODELS.build(model) if 'attention' in model else MODELS.build(model.backbone)
    built = getattr(built, 'backbone', built)
    built.init_weights()
    return built


def benchmark_models(
    builds: Mapping[str, Callable[[], nn.Module]],
    sizes: Sequence[int],
    *,
    batch: int = 1,
    repetitions: int = 3,
    modes: Sequence[str] = MODES,
    device: str = 'cpu',
    autocast: bool = False,
    launches: bool = False,
) -> Iterator[Row]:
    """Measure time and peak memory of backbones on square images.

    Args:
        builds: Functions that build the models, by name; a model takes images and returns maps. The first is the peer.
        sizes: Sides of the images in pixels.
        batch: Images in a call.
        repetitions: Measurements of each model.
        modes: Some of :data:`~mmgate.benchmarks.measure.MODES`.
        device: Device of models and images.
        autocast: True runs under autocast to bfloat16, as in training with mixed precision.
        launches: True counts the launches of kernels on a GPU, too.

    Yields:
        A row for each model, mode, size and metric.
    """
    # The forward mode comes first, because memory that training leaves in the heap would count in it.
    for mode in sorted(set(modes)):
        for size in sizes:
            image = torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(0)).to(device)
            models = {name: build().to(device) for name, build in builds.items()}
            for model in models.values():
                model.train(mode != 'forward')
            providers = {name: partial(_means, model, autocast) for name, model in models.items()}
            x = f'{size}_b{batch}'
            yield from interleaved('backbones', providers, x, [image], mode, repetitions, launches=launches)


def _means(model: nn.Module, autocast: bool, image: Tensor) -> Tensor:
    """Run a backbone and return the mean of each of its maps: a small output that depends on all of the backbone."""
    with torch.autocast(image.device.type, torch.bfloat16, enabled=autocast):
        return torch.stack([map_.mean() for map_ in model(image)])


def draw_curves(rows: Sequence[Row], out: Path, accuracies: Mapping[str, Accuracy] | None = None) -> Path:
    """Draw throughput and memory over the image size, a panel for each mode and metric; return the file's path.

    With ``accuracies``, by provider, further panels draw accuracy against the throughput on images of the first size;
    a second axis on top has the time of an image.
    """
    kinds = sorted({(row.mode, row.metric, row.unit) for row in rows})
    pace = [(mode, metric, unit) for mode, metric, unit in kinds if metric == 'throughput'] if accuracies else []
    columns = len(kinds) + len(pace)
    figure, (axes,) = panels(1, columns, height=3.4, width=4.0 * columns)
    for axis, (mode, metric, unit) in zip(axes, kinds, strict=False):
        axis.set_prop_cycle(color=COLOURS)
        for name in dict.fromkeys(row.provider for row in rows):
            points = [r for r in rows if (r.mode, r.metric, r.provider) == (mode, metric, name)]
            sides = [int(r.x.partition('_')[0]) for r in points]
            axis.plot(sides, [r.y_50 for r in points], marker='o', markersize=3, label=name)
        axis.set(title=f'{mode}: {metric}', xlabel='side of the image, pixels', ylabel=unit, ylim=(0, None))
        axis.grid(alpha=0.3)
    for axis, kind in zip(axes[len(kinds) :], pace, strict=True):
        points = [r for r in rows if (r.mode, r.metric, r.unit) == kind and r.x == rows[0].x]
        _draw_accuracies(axis, points, accuracies or {})
        axis.set_title(f'{kind[0]}: accuracy, {rows[0].x.partition("_")[0]} pixels')
    batch = rows[0].x.rpartition('b')[2]
    note = f'Backbones without heads, on images of random numbers, {batch} at a time; {rows[0].device}.'
    note += '\nMemory: the peak of a call, over what is held when idle; so weights are not in it.'
    legend(figure, axes[0].get_legend_handles_labels()[0], note=note)
    return save(figure, out)


def _draw_accuracies(axis: Any, rows: Sequence[Row], accuracies: Mapping[str, Accuracy]) -> None:
    """Draw a point for each model, in the colour of its curve, and a line through the points of each family."""
    families: dict[str, list[tuple[float, float]]] = {}
    for number, row in enumerate(rows):
        accuracy, family = accuracies[row.provider]
        axis.plot(row.y_50, accuracy, marker='o', markersize=5, color=COLOURS[number % len(COLOURS)], zorder=3)
        families.setdefault(family or row.provider, []).append((row.y_50, accuracy))
    for points in families.values():
        axis.plot(*zip(*sorted(points), strict=True), color='0.6', linewidth=1)
    paces = [row.y_50 for row in rows]
    axis.set(xlim=(0.9 * min(paces), 1.1 * max(paces)), xlabel=rows[0].unit, ylabel='accuracy')
    above = axis.secondary_xaxis('top', functions=(_milliseconds, _milliseconds))
    above.set_xlabel('milliseconds an image', fontsize=8)
    axis.grid(alpha=0.3)


def _milliseconds(images_a_second: Any) -> Any:
    """Convert images per second into milliseconds per image, or back."""
    return 1e3 / np.maximum(images_a_second, 1e-9)
