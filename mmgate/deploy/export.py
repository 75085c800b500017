"""Export a model to an ONNX file, and keep the file only if it finds on real images what the model finds."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from mmengine.logging import print_log
from torch import nn

from mmgate.errors import ConfigError, first_line

from .build import build_network
from .compare import Differences, check_finds_something, compare
from .graph import write
from .network import Network
from .runtime import Exported
from .to_onnx import MAX_BATCH, check_environment

# Divisor of the sides of images, for backbones that need one.
DIVISOR = 32


def export(
    model: nn.Module,
    batches: Sequence[dict[str, Any]],
    path: Path,
    *,
    fixed_size: bool = False,
    threshold: float = 0.05,
) -> Differences:
    """Export a model to an ONNX file and compare the two on images; a file that differs is dropped.

    What was at ``path`` then stays.

    Args:
        model: A detector or a segmentor with its weights, in eval mode.
        batches: Batches of a data loader, one real image each, on which results are compared. The largest gives the
            size of the graph if no graph of several sizes can be written.
        path: File to write; folders are made.
        fixed_size: True writes a graph of one size at once, without an attempt at any size.
        threshold: Detections above this score are compared.

    Returns:
        The differences between the file's results and the model's.

    Raises:
        ConfigError: The model cannot be exported, the images show nothing, or the file differs.
    """
    check_environment()
    path.parent.mkdir(parents=True, exist_ok=True)
    net = build_network(model)
    largest = max(batches, key=lambda batch: math.prod(batch['inputs'][0].shape))
    inputs = net.preprocess(largest)
    problem = None
    divided = not any(side % DIVISOR for side in inputs[0].shape[-2:])
    # Divisors of the sides: 1 for any size, 0 for one size.
    tried = [1, DIVISOR, 0] if divided else [1, 0]
    if fixed_size:
        tried = [0]
    with tempfile.TemporaryDirectory(dir=path.parent, prefix='.export-') as folder:
        check_finds_something(model, batches, threshold)
        new = Path(folder) / path.name
        for number, divisor in enumerate(tried, 1):
            sides = {0: 'one size', 1: 'any size'}.get(divisor, f'sides that {divisor} divides')
            hint = ' (--fixed-size asks for one size at once, which is quickest)' if divisor else ''
            print_log(f'attempt {number} of {len(tried)}: images of {sides}{hint}', logger='current')
            try:
                takes = write(net, inputs, new, divisor=divisor)
                found = _compared(model, batches, new, threshold)
            # Exporters and runtimes raise many kinds of errors.
            except Exception as error:
                problem = error
                reason = first_line(error)
                print_log(f'not to be written for images of {sides}: {reason}', logger='current')
                continue
            print_log(f'{path.name} takes {takes}, up to {MAX_BATCH} at a time', logger='current')
            os.replace(new, path)
            return found
    raise ConfigError(f'{type(model).__name__} cannot be exported: {reason}') from problem


def _compared(model: nn.Module, batches: Sequence[dict[str, Any]], path: Path, threshold: float) -> Differences:
    """Compare an exported file's results with its model's; raise ConfigError if they differ beyond tolerance."""
    run = Exported(path)
    net = build_network(model)
    chosen, description = _batches_for(net, batches, run)
    found = compare(model, net, run, chosen, threshold=threshold)
    found.compared = description
    if not found.tolerated():
        raise ConfigError(f'the exported model differs from PyTorch and is not kept: {found}.')
    return found


def _part(batch: dict[str, Any], divisor: int, least: int) -> dict[str, Any]:
    """Return a batch whose image is cropped to about three quarters of its sides, with another aspect ratio."""
    part = deepcopy(batch)
    (image,) = part['inputs']
    (sample,) = part['data_samples']
    height = max(int(image.shape[1] * 0.75) // divisor * divisor, least)
    width = max(int(image.shape[2] * 0.8) // divisor * divisor, least)
    part['inputs'] = [image[:, :height, :width]]
    sample.set_metainfo(dict(img_shape=(height, width), ori_shape=(height, width), scale_factor=(1.0, 1.0)))
    return part


def _batches_for(net: Network, batches: Sequence[dict[str, Any]], run: Exported) -> tuple[list[dict[str, Any]], str]:
    """Choose the batches on which a file and its model are compared; return them and a description for the log.

    They are the images that the file takes, a part of an image if it takes other sizes, and two images as one batch,
    padded to one size if the file takes any size.
    """
    chosen = []
    sizes = []
    for batch in batches:
        size = net.preprocess(batch)[0].shape[-2:]
        if run.takes(*size):
            chosen.append(batch)
            sizes.append(size)
    description = [f'{len(chosen)} of {len(batches)} images']
    pads = 'sizes' in run.notes['inputs'] and run.notes['divisor'] == 1
    pair = [batch for size, batch in zip(sizes, chosen, strict=True) if pads or size == sizes[0]][:2]
    if run.notes['divisor']:
        chosen.append(_part(chosen[0], run.notes['divisor'], run.notes['least']))
        description.append('part of one')
    if len(pair) == 2:
        first, second = pair
        chosen.append({key: [*first[key], *second[key]] for key in first})
        description.append('two as one batch')
    return chosen, ', '.join(description)
