"""Export a model to an ONNX file, and keep the file only if it finds on real images what the model finds.

``build.py`` makes the model a network of tensors; that of Deformable DETR is ``QueryNetwork`` in ``detectors.py``.
torch.export captures it, while ``tracing.py`` replaces what no graph can hold, and torch.onnx writes it, with the nodes
of ``operators.py``. ``runtime.py`` runs the file, ``compare.py`` compares the results.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from mmengine.logging import print_log
from torch import Tensor, nn

from mmgate._environment import why_not
from mmgate.errors import ConfigError, first_line

from .build import build_network, describe_model
from .compare import Differences, check_finds_something, compare
from .network import Network
from .operators import translations
from .runtime import NOTES_KEY, Exported
from .tracing import traceable

OPSET = 18
# First torch that can export whole detectors.
OLDEST = (2, 9)
# Largest number of images that a file takes.
MAX_BATCH = 64
# Divisors of the images' sides, in the order of the attempts: any size, multiples of 32, and 0 for one size.
DIVISORS = {1: 'any size', 32: 'sides that 32 divides', 0: 'one size'}
# Smallest sides of images, one more than usual strides of the last maps.
LEAST = (33, 65, 129)


def check_environment() -> None:
    """Raise ConfigError if no ONNX file can be written here: torch is too old, or a package is missing."""
    if tuple(int(part) for part in torch.__version__.split('.')[:2]) < OLDEST:
        raise ConfigError(
            f'exporting needs torch {OLDEST[0]}.{OLDEST[1]} or newer, this is {torch.__version__}: export from an '
            'environment of the maintained forks, which loads the same configs and checkpoints.'
        )
    missing = [name for name in ('onnx', 'onnxscript', 'onnxruntime') if why_not(name)]
    if missing:
        raise ConfigError(f'an export to ONNX needs {", ".join(missing)}: pip install "mmgate[deploy]".')


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
    tried = [0] if fixed_size else list(DIVISORS)
    problem = None
    with tempfile.TemporaryDirectory(dir=path.parent, prefix='.export-') as folder:
        check_finds_something(model, batches, threshold)
        new = Path(folder) / path.name
        for number, divisor in enumerate(tried, 1):
            sides = DIVISORS[divisor]
            print_log(f'attempt {number} of {len(tried)}: images of {sides}', logger='current')
            try:
                takes = write(net, inputs, new, divisor)
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


def write(net: Network, inputs: Sequence[Tensor], path: Path, divisor: int) -> str:
    """Write a network as an ONNX file, and return a text on the images that the file takes; torch may raise any error.

    Args:
        net: Network to write.
        inputs: Inputs of a batch. Their values do not matter; their sizes matter if the file takes one size only.
        path: File to write.
        divisor: Divisor of the images' sides; 1 for any sides, 0 for the sides of ``inputs`` only.
    """
    from torch.export import Dim

    # torch.export would fix a batch of one.
    inputs = tuple(torch.cat([x, x])[:2] if len(x) == 1 else x for x in inputs)
    height, width = (int(side) for side in inputs[0].shape[-2:])
    # On smaller images the last maps of a pyramid have sides of one pixel, for which the graph is not valid.
    shorter = min(height, width)
    least = max((side for side in LEAST if side <= shorter), default=shorter)
    steps = -(-least // max(divisor, 1))
    least = steps * divisor
    batch = Dim('batch', min=1, max=MAX_BATCH)
    images: dict[int, Any] = {0: batch}
    if divisor:
        for axis, name in ((2, 'height'), (3, 'width')):
            side = Dim(name, min=steps)
            images[axis] = side if divisor == 1 else divisor * side
    shapes = tuple(images if name == 'images' else {0: batch} for name in net.inputs)
    words = {0: f'{height} x {width} pixels', 1: f'any sides from {least} pixels on'}
    takes = f'images of {words.get(divisor, f"sides that are multiples of {divisor} from {least} pixels on")}'
    with traceable():
        program = torch.export.export(net, inputs, dynamic_shapes=shapes, strict=False)
        written: Any = torch.onnx.export(
            program,
            dynamo=True,
            verbose=False,
            optimize=True,
            opset_version=OPSET,
            input_names=list(net.inputs),
            output_names=list(net.outputs),
            custom_translation_table=translations(),
        )
    graph = written.model.graph
    # The optimizer may remove the nodes that made constants, and put a shared one after its first use.
    for value in [value for node in graph.all_nodes() for value in node.inputs if value is not None]:
        if value.producer() is None and value.const_value is not None and value.name not in graph.initializers:
            graph.register_initializer(value)
    graph.sort()
    notes: dict[str, Any] = dict(inputs=net.inputs, outputs=net.outputs, model=describe_model(net.model), takes=takes)
    notes |= dict(divisor=divisor, least=least, size=[height, width])
    written.model.metadata_props[NOTES_KEY] = json.dumps(notes)
    written.save(path, external_data=False)
    return takes


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
    sizes = [net.preprocess(batch)[0].shape[-2:] for batch in batches]
    taken = [(size, batch) for size, batch in zip(sizes, batches, strict=True) if run.takes(*size)]
    chosen = [batch for _, batch in taken]
    description = [f'{len(chosen)} of {len(batches)} images']
    pads = 'sizes' in run.notes['inputs'] and run.notes['divisor'] == 1
    pair = [batch for size, batch in taken if pads or size == taken[0][0]][:2]
    if run.notes['divisor']:
        chosen.append(_part(chosen[0], run.notes['divisor'], run.notes['least']))
        description.append('part of one')
    if len(pair) == 2:
        first, second = pair
        chosen.append({key: [*first[key], *second[key]] for key in first})
        description.append('two as one batch')
    return chosen, ', '.join(description)
