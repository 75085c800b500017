"""Read the levels' sizes and starts from tensors as Python numbers, with as few GPU synchronisations as possible.

All layers of a model get the same two tensors in a forward pass, or the same list of sizes. The numbers of a tensor are
read once and kept as long as the tensor; the tensors of a list are made once for a device.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..tracing import is_exporting, is_traced

Sizes = tuple[tuple[int, int], ...]
_numbers: Any = WeakTensorKeyDictionary()  # of a tensor: its version, and what it holds


def numbers_of(spatial_shapes: Tensor, level_start_index: Tensor) -> tuple[list[list[int]], list[int]]:
    """Return the levels' sizes and starts as Python numbers, with one GPU synchronisation at the first call.

    Later calls on the same tensors take the numbers from a cache.

    Args:
        spatial_shapes: ``(L, 2)`` as (height, width), integer.
        level_start_index: ``(L,)``, integer.
    """
    sizes = _known(spatial_shapes)
    starts = _known(level_start_index)
    if sizes is None or starts is None:
        both = torch.cat([spatial_shapes.flatten(), level_start_index]).tolist()
        count = len(both) // 3
        sizes = [both[2 * level : 2 * level + 2] for level in range(count)]
        starts = both[2 * count :]
        _keep(spatial_shapes, sizes)
        _keep(level_start_index, starts)
    return sizes, starts


def _known(tensor: Tensor) -> Any:
    """Return a tensor's values from the cache, or None if they are not cached or the tensor has changed since."""
    version, numbers = _numbers.get(tensor, (None, None))
    return numbers if version is not None and version == tensor._version else None


def _keep(tensor: Tensor, numbers: Any) -> None:
    """Cache a tensor's values as Python numbers.

    Tensors of inference mode are left out: they have no version, by which a change would be noticed.
    """
    if not tensor.is_inference():
        _numbers[tensor] = (tensor._version, numbers)


def levels_on(device: torch.device, sizes: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Return ``spatial_shapes`` and ``level_start_index`` for levels of these sizes, as cached tensors on a device.

    They are made once for each device and list of sizes, so that layers copy nothing and CUDA graphs can be captured
    after a first call.

    Args:
        device: Of the values.
        sizes: Height and width of the levels.
    """
    if is_traced() or torch.jit.is_tracing():  # sizes may be symbols, and tensors belong to the graph
        shapes, starts = _tensors(device, sizes)
        if is_exporting():
            _keep_levels(shapes, starts, sizes)
        return shapes, starts
    return _cached(device, tuple((int(height), int(width)) for height, width in sizes))


@functools.lru_cache(maxsize=64)
def _cached(device: torch.device, sizes: Sizes) -> tuple[Tensor, Tensor]:
    # Tensors of inference mode could not be saved for a backward pass later.
    with torch.inference_mode(False):
        shapes, starts = _tensors(device, sizes)
    _keep_levels(shapes, starts, sizes)
    return shapes, starts


def _keep_levels(shapes: Tensor, starts: Tensor, sizes: Sequence[Sequence[int]]) -> None:
    """Cache the values of two tensors, sizes and starts of levels, that were made from Python numbers."""
    areas = [height * width for height, width in sizes]
    _keep(shapes, [list(size) for size in sizes])
    _keep(starts, [sum(areas[:level]) for level in range(len(areas))])


def _tensors(device: torch.device, sizes: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    shapes = torch.tensor(sizes, device=device)
    areas = shapes.prod(-1)
    return shapes, areas.cumsum(0) - areas
