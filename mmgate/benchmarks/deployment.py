"""Time of whole models on this machine: PyTorch, torch.compile and exported files, in one run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mmgate.deploy.commands import FOLDER, add_images, config_parser, load_with_images
from mmgate.deploy.export import SUFFIXES, check_format, check_writable, export
from mmgate.deploy.networks import network
from mmgate.deploy.runtime import Exported
from mmgate.errors import ConfigError

from .ops import Row, interleaved, write_csv

PYTORCH, COMPILED = 'PyTorch', 'torch.compile'
FILES: Mapping[str, tuple[str, str]] = {  # provider: its file's format and how deformable attention is written
    'onnxruntime': ('onnx', 'gather'),
    'onnxruntime, grid': ('onnx', 'grid'),
    'AOTInductor': ('aot-inductor', 'gather'),
}
PROVIDERS = (PYTORCH, COMPILED, *FILES)


def benchmark(argv: list[str]) -> None:
    """Time a model in PyTorch, compiled and as exported files."""
    parser = config_parser('Time a model in PyTorch, compiled and as exported files, on one real image')
    add_images(parser)
    parser.add_argument('--providers', nargs='+', choices=PROVIDERS, default=PROVIDERS, help='default: all')
    parser.add_argument('--repetitions', type=int, default=5)
    parser.add_argument('--threads', type=int, help="torch's and onnxruntime's threads (default: all)")
    parser.add_argument('--out', help='CSV to write (default: work_dirs/deploy/NAME.csv)')
    args = parser.parse_args(argv)
    check_format('onnx')
    out = Path(args.out or f'{FOLDER}/{Path(args.config).stem}.csv')
    check_writable(out)
    if args.repetitions < 1 or (args.threads or 1) < 1:
        raise ConfigError('--repetitions and --threads are 1 or more.')
    if args.threads:
        torch.set_num_threads(args.threads)
    loaded, batches = load_with_images(args)
    options = dict(providers=args.providers, repetitions=args.repetitions, threshold=args.score_thr)
    rows = list(benchmark_deployment(loaded.name, loaded.model, batches[0], Path(FOLDER), **options))
    for row in rows:
        print(f'{row.provider:18} {row.x:14} {row.y_50:9.1f} ms  x {row.ratio_to_peer:.2f}')
    write_csv(rows, out)
    print(f'written to {out}')


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
