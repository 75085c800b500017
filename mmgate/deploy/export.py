"""A model as a file, and whether the file finds what the model finds."""

from __future__ import annotations

import logging
import math
import os
import tempfile
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from mmengine.logging import print_log
from torch import nn

from mmgate._environment import why_not
from mmgate.analysis.loading import check_folder
from mmgate.errors import ConfigError

from .capture import MAX_BATCH, Captured, capture, check_torch
from .compare import Differences, check_finds_something, compare
from .network import Network
from .networks import network
from .runtime import Exported, write_package, write_program

PACKAGE = 'aot-inductor'
SUFFIXES = {'onnx': '.onnx', 'torch-export': '.pt2', PACKAGE: '.pt2'}
NEEDED = ('onnx', 'onnxscript', 'onnxruntime')


def check_format(format: str, msda: str = 'gather') -> None:
    """Refuse what cannot be written here.

    Raises:
        ConfigError: torch is too old, a package is missing, or the format has no plug-ins.
    """
    check_torch()
    missing = [name for name in NEEDED if why_not(name)] if format == 'onnx' else []
    if missing:
        raise ConfigError(f'--format onnx needs {", ".join(missing)}: pip install "mmgate[deploy]".')
    if msda == 'plugin' and format != 'onnx':
        raise ConfigError(f'--msda plugin is a node of TensorRT, for --format onnx alone, not {format}.')


def check_writable(path: Path) -> None:
    """Make the folder of a file, and refuse a path that none can be written to.

    Raises:
        ConfigError: With the reason.
    """
    check_folder(path.parent)
    if path.is_dir():
        raise ConfigError(f'{path} is a folder. Give another --out.')


def export(
    model: nn.Module,
    batches: Sequence[dict[str, Any]],
    path: Path,
    *,
    format: str = 'onnx',
    msda: str = 'gather',
    fixed_size: bool = False,
    threshold: float = 0.05,
) -> Differences:
    """Write a model to a file that finds what it finds; what differs is not kept, and what ``path`` held then stays.

    Args:
        model: A detector or a segmentor with its weights, in eval mode.
        batches: Of a data loader, one real image each. Their values are what is compared; the size of the largest is
            the graph's where the model takes no others.
        path: File to write; folders are made.
        format: ``'onnx'``, ``'torch-export'`` or ``'aot-inductor'``.
        msda: One of :data:`mmgate.deploy.sampling.SAMPLERS`. What holds TensorRT's plug-in, which TensorRT alone can
            run, is compared as a graph that differs in these nodes alone.
        fixed_size: Whether not to try for images of any size.
        threshold: Detections are compared above this score.

    Returns:
        How far the file's results were from the model's.

    Raises:
        ConfigError: The model cannot be exported, the images show nothing, or the file differs.
    """
    check_format(format, msda)
    check_writable(path)
    check_finds_something(model, batches, threshold)
    options: dict[str, Any] = dict(format=format, msda=msda, fixed_size=fixed_size)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix='.export-') as folder:
        new = Path(folder) / path.name
        while True:
            captured = write(model, batches, new, **options)
            print_log(f'{path.name} takes {captured.takes}, up to {MAX_BATCH} at a time', logger='current')
            try:
                found = _compared(model, batches, new, options, threshold)
                break
            except Exception as error:  # whatever a runtime stumbles over
                if not captured.divisor:
                    raise
                print_log(f'the graph of any size does not hold, one size is written: {error}', logger='current')
                options['fixed_size'] = True
        os.replace(new, path)
    return found


def _compared(
    model: nn.Module, batches: Sequence[dict[str, Any]], path: Path, options: dict[str, Any], threshold: float
) -> Differences:
    runs = path
    if options['msda'] == 'plugin':
        runs = path.with_name(f'gather-{path.name}')
        write(model, batches, runs, **{**options, 'msda': 'gather'})
    run, net = Exported(runs, trusted=True), network(model)
    taken, what = _taken(net, batches, run)
    found = compare(model, net, run, taken, threshold=threshold)
    found.what = what if runs == path else f"{what}, by rows gathered in the place of the plug-in's nodes"
    if not found.tolerated():
        raise ConfigError(f'the exported model differs from PyTorch and is not kept: {found}.')
    return found


def write(
    model: nn.Module, batches: Sequence[dict[str, Any]], path: Path, *, format: str, msda: str, fixed_size: bool
) -> Captured:
    """Write a model to ``path`` and return what was written; arguments as :func:`export`."""
    net = network(model)
    largest = max(batches, key=lambda batch: math.prod(batch['inputs'][0].shape))
    graph = 'torch-export' if format == PACKAGE else format
    captured = capture(net, net.preprocess(largest), format=graph, msda=msda, fixed_size=fixed_size)
    notes: dict[str, Any] = dict(inputs=net.inputs, outputs=net.outputs, msda=msda, **net.holds())
    notes.update(divisor=captured.divisor, least=captured.least, size=captured.size, takes=captured.takes)
    if format == 'onnx':
        from .onnx_file import write_onnx

        write_onnx(captured.program, net, path, notes)
    else:
        (write_package if format == PACKAGE else write_program)(captured.program, path, notes)
    return captured


def _part(batch: dict[str, Any], divisor: int, least: int) -> dict[str, Any]:
    """Return a batch with about three quarters of its image each way, and another shape."""
    part = deepcopy(batch)
    for number, (image, sample) in enumerate(zip(part['inputs'], part['data_samples'], strict=True)):
        height, width = (
            max(int(side * share) // divisor * divisor, least)
            for side, share in zip(image.shape[1:], (0.75, 0.8), strict=True)
        )
        part['inputs'][number] = image[:, :height, :width]
        sample.set_metainfo(dict(img_shape=(height, width), ori_shape=(height, width), scale_factor=(1.0, 1.0)))
    return part


def _taken(net: Network, batches: Sequence[dict[str, Any]], run: Exported) -> tuple[list[dict[str, Any]], str]:
    """Return the batches that a file takes, part of an image if it takes other sizes, and two images as one batch.

    The two are padded to one size if they may be. The words say what there is.
    """
    taken = [(size, batch) for batch in batches if run.takes(*(size := net.preprocess(batch)[0].shape[-2:]))]
    listed, words = [batch for _, batch in taken], [f'{len(taken)} of {len(batches)} images']
    if len(taken) < len(batches):
        print_log(
            f'{len(batches) - len(taken)} of {len(batches)} images are of sizes that the file does not take: '
            f'it takes {run.notes["takes"]}',
            logger='current',
            level=logging.WARNING,
        )
    if run.notes['divisor']:
        listed.append(_part(taken[0][1], run.notes['divisor'], run.notes['least']))
        words.append('part of one')
    pads = 'sizes' in run.notes['inputs'] and run.notes['divisor'] == 1
    pair = [batch for size, batch in taken if pads or size == taken[0][0]][:2]
    if len(pair) == 2:
        listed.append({key: [part for batch in pair for part in batch[key]] for key in pair[0]})
        words.append('two as one batch')
    return listed, ', '.join(words)
