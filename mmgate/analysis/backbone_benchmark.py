"""Time and peak memory of backbones over the image size, ours beside the vanilla ones in one run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from mmengine.registry import MODELS
from torch import Tensor, nn

from .benchmark import MODES, Row, interleaved

BACKBONES: dict[str, dict[str, Any]] = {
    'PVT-T': dict(type='mmdet.PyramidVisionTransformer', num_layers=[2, 2, 2, 2]),
    'Agent-PVT-T': dict(type='mmgate.AgentPVT', arch='tiny'),
    'Agent-PVT-T, dense': dict(type='mmgate.AgentPVT', arch='tiny', agent_nums=(144, 256, 784, 784)),
    'SAGA-PVT-T': dict(type='mmgate.SAGAPVT', arch='tiny'),
    'PVT-L': dict(type='mmdet.PyramidVisionTransformer', num_layers=[3, 8, 27, 3]),
    'Agent-PVT-S': dict(type='mmgate.AgentPVT', arch='small'),
    'Swin-T': dict(type='mmdet.SwinTransformer'),
    'Agent-Swin-T': dict(type='mmgate.AgentSwin', arch='tiny'),
    'SAGA-Swin-T': dict(type='mmgate.SAGASwin', arch='tiny'),
}
SUITES = {
    'pvt-t': ('PVT-T', 'Agent-PVT-T', 'Agent-PVT-T, dense', 'SAGA-PVT-T'),
    'pvt-l': ('PVT-L', 'Agent-PVT-S'),
    'swin-t': ('Swin-T', 'Agent-Swin-T', 'SAGA-Swin-T'),
}


def benchmark_backbones(
    suite: str, sizes: Sequence[int], *, batch: int = 1, repetitions: int = 3, modes: Sequence[str] = MODES
) -> Iterator[Row]:
    """Measure a suite of backbones on square images; the first of the suite is the peer.

    Args:
        suite: A key of :data:`SUITES`.
        sizes: Sides of the images, in pixels.
        batch: Images at a time.
        repetitions: Measurements a row is the median of, after one that warms up.
        modes: ``'forward'``, ``'forward+backward'`` or both.
    """
    for mode in modes:  # forward first: what training leaves in the heap would count as memory of a later row
        for size in sizes:
            image = torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(0))
            models = {name: MODELS.build(dict(BACKBONES[name])) for name in SUITES[suite]}
            for model in models.values():
                model.train(mode != 'forward')
            providers = {name: partial(_means, model) for name, model in models.items()}
            yield from interleaved(f'backbones {suite}', providers, f'{size}_b{batch}', [image], mode, repetitions)


def _means(model: nn.Module, image: Tensor) -> Tensor:
    """Return the mean of every map, a small output that depends on all of the backbone."""
    return torch.stack([map_.mean() for map_ in model(image)])


def draw_curves(rows: Sequence[Row], out: str | Path) -> Path:
    """Draw time and peak memory against the image's side, one panel for each mode and metric, and return the path."""
    import matplotlib

    matplotlib.use('Agg')
    from matplotlib import pyplot

    panels = sorted({(row.mode, row.metric, row.unit) for row in rows})
    figure, axes = pyplot.subplots(1, len(panels), figsize=(4.2 * len(panels), 3.6), squeeze=False)
    for axis, (mode, metric, unit) in zip(axes[0], panels, strict=True):
        for name in dict.fromkeys(row.provider for row in rows):
            points = [r for r in rows if (r.mode, r.metric, r.provider) == (mode, metric, name)]
            sides = [int(r.x.partition('_')[0]) for r in points]
            axis.plot([side**2 / 1e6 for side in sides], [r.y_50 for r in points], marker='o', markersize=3, label=name)
        axis.set(title=f'{mode}: {metric}', xlabel='megapixels', ylabel=unit, ylim=(0, None))
        axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    path = Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path
