"""Time and peak memory of backbones over the image size, all of them in one run, and their curves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from mmgate.analysis.figures.style import COLOURS, legend, panels, save

from .measure import MODES, Row, interleaved


def benchmark_models(
    builds: Mapping[str, Callable[[], nn.Module]],
    sizes: Sequence[int],
    *,
    batch: int = 1,
    repetitions: int = 3,
    modes: Sequence[str] = MODES,
    device: str = 'cpu',
    autocast: bool = False,
) -> Iterator[Row]:
    """Measure backbones on square images, so many pixels a side, a ``batch`` at a time; the first is the peer.

    The ``builds`` return models that take images and return maps. Autocast is to bfloat16, as mixed precision trains.
    """
    for mode in sorted(set(modes)):  # forward first: what training leaves in the heap would count as memory
        for size in sizes:
            image = torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(0)).to(device)
            models = {name: build().to(device) for name, build in builds.items()}
            for model in models.values():
                model.train(mode != 'forward')
            providers = {name: partial(_means, model, autocast) for name, model in models.items()}
            yield from interleaved('backbones', providers, f'{size}_b{batch}', [image], mode, repetitions)


def _means(model: nn.Module, autocast: bool, image: Tensor) -> Tensor:
    """Return the mean of every map, a small output that depends on all of the backbone."""
    with torch.autocast(image.device.type, torch.bfloat16, enabled=autocast):
        return torch.stack([map_.mean() for map_ in model(image)])


def draw_curves(rows: Sequence[Row], out: Path) -> Path:
    """Draw time and memory against the images' side, one panel for each mode and metric, and return the path."""
    kinds = sorted({(row.mode, row.metric, row.unit) for row in rows})
    figure, (axes,) = panels(1, len(kinds), height=3.4, width=4.0 * len(kinds))
    for axis, (mode, metric, unit) in zip(axes, kinds, strict=True):
        axis.set_prop_cycle(color=COLOURS)
        for name in dict.fromkeys(row.provider for row in rows):
            points = [r for r in rows if (r.mode, r.metric, r.provider) == (mode, metric, name)]
            sides = [int(r.x.partition('_')[0]) for r in points]
            axis.plot(sides, [r.y_50 for r in points], marker='o', markersize=3, label=name)
        axis.set(title=f'{mode}: {metric}', xlabel='side of the image, pixels', ylabel=unit, ylim=(0, None))
        axis.grid(alpha=0.3)
    legend(figure, axes[0].get_legend_handles_labels()[0])
    return save(figure, out)
