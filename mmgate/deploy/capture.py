"""A network as a program of torch.export, of any batch and, where the model allows, any size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .network import Network
from .sampling import sampled_by
from .tracing import traceable

MAX_BATCH = 64
LEAST = (33, 65, 129)  # of sides: more than the strides of the last maps


def capture(
    network: Network, inputs: Sequence[Tensor], divisor: int, msda: str = 'gather'
) -> tuple[Any, dict[str, Any]]:
    """Write a network down, or fail in any of the exporter's ways.

    Args:
        network: What to write.
        inputs: Of a batch; the values do not matter, the sizes do where the model takes no others.
        divisor: Of the sides of images; 1 for any, 0 for those of ``inputs`` alone.
        msda: How deformable attention is written, one of :data:`mmgate.deploy.sampling.SAMPLERS`.

    Returns:
        The program and which images it takes: ``divisor`` and ``least`` of their sides, the ``size`` of those that it
        was written from, and ``takes``, all of it in words.
    """
    from torch.export import Dim

    inputs = tuple(torch.cat([x, x])[:2] if len(x) == 1 else x for x in inputs)  # a batch of one would stay one
    height, width = (int(side) for side in inputs[0].shape[-2:])
    # below it the smallest maps of a pyramid have one pixel a side, and a graph of many is none of one
    least = max((side for side in LEAST if side <= min(height, width)), default=min(height, width))
    steps = -(-least // max(divisor, 1))
    least, batch = steps * divisor, Dim('batch', min=1, max=MAX_BATCH)
    images: dict[int, Any] = {0: batch}
    if divisor:
        sides = [Dim(name, min=steps) for name in ('height', 'width')]
        images |= {axis: side if divisor == 1 else divisor * side for axis, side in zip((2, 3), sides, strict=True)}
    shapes = tuple(images if name == 'images' else {0: batch} for name in network.inputs)
    with traceable(sampled_by(msda)):
        program = torch.export.export(network, inputs, dynamic_shapes=shapes, strict=False)
    words = {0: f'{height} x {width} pixels', 1: f'any sides from {least} pixels on'}
    takes = words.get(divisor, f'sides that are multiples of {divisor} from {least} pixels on')
    return program, dict(divisor=divisor, least=least, size=[height, width], takes=f'images of {takes}')
