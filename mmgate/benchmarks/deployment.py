"""Time of whole models on this machine: PyTorch, torch.compile and exported files, in one run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mmgate.deploy.export import SUFFIXES, export
from mmgate.deploy.networks import network
from mmgate.deploy.runtime import Exported

from .ops import Row, interleaved

PYTORCH, COMPILED = 'PyTorch', 'torch.compile'
FILES: Mapping[str, tuple[str, str]] = {  # provider: its file's format and how deformable attention is written
    'onnxruntime': ('onnx', 'gather'),
    'onnxruntime, grid': ('onnx', 'grid'),
    'AOTInductor': ('aot-inductor', 'gather'),
}
PROVIDERS = (PYTORCH, COMPILED, *FILES)


def benchmark_deployment(
    name: str,
    model: nn.Module,
    batch: dict[str, Any],
    folder: Path,
    *,
    providers: Sequence[str] = PROVIDERS,
    repetitions: int = 5,
    threshold: float = 0.05,
) -> Iterator[Row]:
    """Measure one model on one preprocessed image, from tensors to tensors; PyTorch's eager mode is the peer.

    Args:
        name: Of the model, in the rows.
        model: A detector or a segmentor with its weights, in eval mode.
        batch: Of a data loader, one real image: what is exported is compared on it before it is timed.
        folder: Where the files go.
        providers: Some of :data:`PROVIDERS`.
        repetitions: Measurements a row is the median of, after one that warms up.
        threshold: Of the comparison.
    """
    net = network(model)
    inputs = net.preprocess(batch)
    runs: dict[str, Callable[..., Any]] = {PYTORCH: net}
    for provider in providers:
        if provider == COMPILED:
            runs[provider] = torch.compile(net)
        elif provider in FILES:
            format, msda = FILES[provider]
            path = folder / f'{name}-{msda}{SUFFIXES[format]}'
            export(model, [batch], path, format=format, msda=msda, fixed_size=True, threshold=threshold)
            runs[provider] = Exported(path, trusted=True)
    height, width = inputs[0].shape[-2:]
    rows = interleaved(f'deployment {name}', runs, f'{height}x{width}_b1', list(inputs), 'forward', repetitions)
    yield from (row for row in rows if row.metric == 'time')  # torch's memory says nothing of other runtimes
