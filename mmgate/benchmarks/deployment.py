"""Time of whole models on this machine: PyTorch, torch.compile and exported files, in one run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mmgate.deploy.build import build_network
from mmgate.deploy.export import export
from mmgate.deploy.runtime import Exported

from .measure import Row, interleaved

FILES = {'onnxruntime': 'gather', 'onnxruntime, grid': 'grid'}  # how a file's deformable attention is written
PROVIDERS = ('PyTorch', 'torch.compile', *FILES)


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

    The ``batch`` of a data loader is of one real image: what is exported to ``folder`` is compared on it, above a score
    of ``threshold``, before it is timed.
    """
    net = build_network(model)
    inputs = net.preprocess(batch)
    runs: dict[str, Callable[..., Any]] = {'PyTorch': net}
    for provider in providers:
        if provider == 'torch.compile':
            runs[provider] = torch.compile(net)
        elif provider in FILES:
            path = folder / f'{name}-{FILES[provider]}.onnx'
            export(model, [batch], path, msda=FILES[provider], fixed_size=True, threshold=threshold)
            runs[provider] = Exported(path)
    height, width = inputs[0].shape[-2:]
    rows = interleaved(f'deployment {name}', runs, f'{height}x{width}_b1', list(inputs), 'forward', repetitions)
    yield from (row for row in rows if row.metric == 'time')  # torch's memory says nothing of other runtimes
