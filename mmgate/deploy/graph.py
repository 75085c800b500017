"""Capture networks as graphs with torch.export, for any batch and, if the model allows, any image size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .build import describe_model
from .network import Network
from .operators import translations
from .sampling import gathering
from .to_onnx import MAX_BATCH, write_program
from .tracing import traceable

if TYPE_CHECKING:
    from torch.export import ExportedProgram

# Smallest sides of images, one more than usual strides of the last maps.
LEAST = (33, 65, 129)


def write(net: Network, inputs: Sequence[Tensor], path: Path, *, divisor: int) -> str:
    """Export a network to the ONNX file ``path``, and return a text on the images that the file takes.

    The other arguments are those of :func:`capture`.
    """
    program, taken = capture(net, inputs, divisor)
    notes = dict(model=describe_model(net.model), inputs=net.inputs, outputs=net.outputs, **taken)
    write_onnx(program, net, path, notes)
    return taken['takes']


def capture(network: Network, inputs: Sequence[Tensor], divisor: int) -> tuple[ExportedProgram, dict[str, Any]]:
    """Capture a network as a graph with torch.export and return the program; torch may raise any error.

    Args:
        network: Network to capture.
        inputs: Inputs of a batch. Their values do not matter; their sizes matter if the program takes one size only.
        divisor: Divisor of the images' sides; 1 for any sides, 0 for the sides of ``inputs`` only.

    Returns:
        The program, and a dict about the images that it takes: ``divisor`` and least value ``least`` of their sides,
        ``size`` of ``inputs``, and ``takes``, a description in words.
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
    shapes = tuple(images if name == 'images' else {0: batch} for name in network.inputs)
    with traceable(gathering()):
        program = torch.export.export(network, inputs, dynamic_shapes=shapes, strict=False)
    words = {0: f'{height} x {width} pixels', 1: f'any sides from {least} pixels on'}
    takes = words.get(divisor, f'sides that are multiples of {divisor} from {least} pixels on')
    return program, dict(divisor=divisor, least=least, size=[height, width], takes=f'images of {takes}')


def write_onnx(program: ExportedProgram, network: Network, path: Path, notes: Mapping[str, Any]) -> None:
    """Write a captured program as an ONNX file, with ``notes`` in its metadata."""
    write_program(program, network.inputs, network.outputs, path, notes, translations())
