"""A network as a program of torch.export, of any batch and, where the model allows, any size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from mmengine.logging import print_log
from torch import Tensor

from mmgate.errors import ConfigError

from .network import Network
from .sampling import sampled_by
from .tracing import traceable

MAX_BATCH = 64
OLDEST = (2, 9)
DIVISOR = 32  # of sides, where a backbone wants one
LEAST = (33, 65, 129)  # of sides: more than the strides of the last maps


@dataclass(frozen=True)
class Captured:
    """What was written down.

    Attributes:
        program: The program.
        divisor: Of the sides of images that it takes; 0 where it takes those of one size alone.
        least: Of those sides.
        size: Height and width of the images that it was written from.
    """

    program: Any
    divisor: int
    least: int
    size: tuple[int, int]

    @property
    def takes(self) -> str:
        """What it takes, in words."""
        if not self.divisor:
            return f'images of {self.size[0]} x {self.size[1]} pixels'
        sides = 'any sides' if self.divisor == 1 else f'sides that are multiples of {self.divisor}'
        return f'images of {sides} from {self.least} pixels on'


def check_torch() -> None:
    """Refuse a torch whose export is not up to whole detectors.

    Raises:
        ConfigError: With what to do.
    """
    found = tuple(int(part) for part in torch.__version__.split('.')[:2])
    if found < OLDEST:
        raise ConfigError(
            f'exporting needs torch {OLDEST[0]}.{OLDEST[1]} or newer, this is {torch.__version__}: export from an '
            'environment of the maintained forks, which loads the same configs and checkpoints.'
        )


def capture(
    network: Network, inputs: Sequence[Tensor], *, format: str, msda: str = 'gather', fixed_size: bool = False
) -> Captured:
    """Write a network down.

    Args:
        network: What to write.
        inputs: Of a batch; the values do not matter, the sizes do where the model takes no others.
        format: ``'onnx'`` or ``'torch-export'``.
        msda: How deformable attention is written, one of :data:`mmgate.deploy.sampling.SAMPLERS`.
        fixed_size: Whether to take images of this size alone without trying others.

    Raises:
        ConfigError: The model cannot be written down even for one size.
    """
    check_torch()
    inputs = tuple(torch.cat([x, x])[:2] if len(x) == 1 else x for x in inputs)  # a batch of one would stay one
    height, width = (int(side) for side in inputs[0].shape[-2:])
    tried = [1, DIVISOR] if not (height % DIVISOR or width % DIVISOR) else [1]
    # below it the smallest maps of a pyramid have one pixel a side, and a graph of many is none of one
    least = max((side for side in LEAST if side <= min(height, width)), default=min(height, width))
    problem: Exception | None = None
    for divisor in [0] if fixed_size else [*tried, 0]:
        try:
            with traceable(format, sampled_by(msda)):
                shapes = _shapes(network, divisor, least)
                program = torch.export.export(network, inputs, dynamic_shapes=shapes, strict=False)
            _check_dynamic(program, divisor)
            return Captured(program, divisor, -(-least // max(divisor, 1)) * divisor, (height, width))
        except ConfigError:
            raise
        except Exception as error:  # whatever the exporter stumbles over
            problem = error
            what = {0: 'one size', 1: 'any size'}.get(divisor, f'multiples of {divisor} pixels')
            print_log(f'not to be written for images of {what}: {_first_line(error)}', logger='current')
    raise ConfigError(f'{type(network.host).__name__} cannot be exported: {_first_line(problem)}') from problem


def _check_dynamic(program: Any, divisor: int) -> None:
    """Refuse a program that settled for sizes that it was not asked to settle for."""
    names = program.graph_signature.user_inputs
    shapes = [node.meta['val'].shape for node in program.graph.nodes if node.op == 'placeholder' and node.name in names]
    sides = [shapes[0][0], *(shapes[0][2:] if divisor else [])]
    if any(isinstance(side, int) or side.node.expr.is_number for side in sides):
        raise ValueError(f'the graph took {tuple(shapes[0])} for the only size')


def _first_line(error: BaseException | None) -> str:
    lines = str(error).strip().splitlines()
    return f'{type(error).__name__}: {lines[0] if lines else ""}'


def _shapes(network: Network, divisor: int, least: int) -> tuple[Any, ...]:
    from torch.export import Dim

    batch = Dim('batch', min=1, max=MAX_BATCH)
    images: dict[int, Any] = {0: batch}
    if divisor:
        for axis, name in ((2, 'height'), (3, 'width')):
            images[axis] = Dim(name, min=least) if divisor == 1 else divisor * Dim(name, min=-(-least // divisor))
    return tuple(images if name == 'images' else {0: batch} for name in network.inputs)
