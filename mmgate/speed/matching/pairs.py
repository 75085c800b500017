"""Solve assignment problems and compute L1 distances of boxes, with torch and scipy alone."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mmgate.errors import ConfigError
from mmgate.ops.autocast import autocast_dtype

# The width of a box, for which the order of the sum is known.
SIDES = 4
# Pairs of prediction and object, which take about two milliseconds.
IN_THREADS = 500_000
NARROW = (torch.float16, torch.bfloat16)


def match_pairs(
    cost: Tensor, place: str = 'an image', parts: Callable[[], Iterable[tuple[str, Tensor]]] | None = None
) -> np.ndarray:
    """Solve the assignment problem: return pairs of prediction and object with the least total cost, ``(2, N)``.

    Predictions are in ascending order.

    Args:
        cost: Costs ``(Q, G)`` of predictions and objects, on the CPU.
        place: Name of the predictions in the error, such as ``'layer 2 of 6, image 1 of the batch'``.
        parts: Function that computes anew the costs ``(Q, G)`` that ``cost`` adds up, by name, for the error.

    Raises:
        ConfigError: A cost is NaN or minus infinity, or no pairs of finite cost match all; the message names the costs.
    """
    try:
        return _solve(cost)
    except ValueError as error:
        costs = [('the cost', cost)] if parts is None else parts()
        counts = [(name, int((~one.isfinite()).sum())) for name, one in costs]
        faults = [f'{name} is NaN or infinite in {n} of {cost.numel()} pairs' for name, n in counts if n]
        dtype = next(filter(None, map(autocast_dtype, ('cuda', 'cpu'))), None)
        if dtype == torch.float16:
            remedy = (
                'This is mixed precision in float16, where numbers above 65504 are infinite: train in bfloat16 '
                "(optim_wrapper.dtype='bfloat16') or without --amp."
            )
        else:
            remedy = (
                f'Mixed precision is {f"on, in {dtype}" if dtype else "off"}, so that the training has diverged or '
                'a box of an object is no number: lower the learning rate, clip gradients (optim_wrapper.clip_grad), '
                'and look at the annotations.'
            )
        raise ConfigError(
            f'The predictions of {place} cannot be matched to objects: {", ".join(faults)}. {remedy} Weights that are '
            'NaN stay so: go on from a checkpoint before that.'
        ) from error


class Problem(NamedTuple):
    """Assignment problem: the arguments of :func:`match_pairs`."""

    cost: Tensor
    place: str = 'an image'
    parts: Callable[[], Iterable[tuple[str, Tensor]]] | None = None


def match_all(problems: Sequence[Problem]) -> list[np.ndarray]:
    """Solve many assignment problems as :func:`match_pairs` does one, large ones in parallel threads."""
    # SciPy releases the interpreter's lock. Small problems are solved before threads would start.
    if sum(problem.cost.numel() for problem in problems) >= IN_THREADS:
        try:
            return list(_threads(os.getpid()).map(_solve, [problem.cost for problem in problems]))
        except ValueError:
            pass  # told below, in the thread that knows of autocast
    return [match_pairs(*problem) for problem in problems]


def _solve(cost: Tensor) -> np.ndarray:
    return np.stack(linear_sum_assignment(cost.numpy()))


@functools.cache
def _threads(process: int) -> ThreadPoolExecutor:
    # By process, because a forked one has the object without its threads.
    return ThreadPoolExecutor(os.cpu_count(), 'mmgate-matching')


def to_device(numbers: Tensor, device: torch.device | str) -> Tensor:
    """Copy a CPU tensor to a device without waiting for the GPU; CUDA keeps a copy of pageable memory."""
    return numbers.to(device, non_blocking=True)


def l1_distances(first: Tensor, second: Tensor) -> Tensor:
    """Compute the L1 distance of each two boxes, ``(..., Q, G)``, bit for bit as ``torch.cdist`` with ``p=1``.

    Args:
        first: Boxes ``(..., Q, 4)``. float16 and bfloat16 are widened to float32, as autocast does for torch.cdist.
        second: Boxes ``(..., G, 4)``.
    """
    first, second = (boxes.float() if boxes.dtype in NARROW else boxes for boxes in (first, second))
    apart = (first[..., :, None, :] - second[..., None, :, :]).abs()  # (..., Q, G, 4)
    x, y, width, height = apart.unbind(-1)
    # torch.cdist's kernel for CUDA adds halves of a warp to each other, the one for the CPU number after number.
    if apart.is_cuda:
        return (x + width) + (y + height)
    return ((x + y) + width) + height


class BroadcastDistances(TorchFunctionMode):
    """Torch function mode in which ``torch.cdist`` computes L1 distances of boxes by :func:`l1_distances`, faster.

    For every pair torch.cdist starts a block of 256 threads on a GPU, of which 4 have a number to add.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call a torch function; ``torch.cdist`` of boxes with ``p=1`` is replaced by :func:`l1_distances`."""
        kwargs = kwargs or {}
        if func is torch.cdist and _are_boxes(*args, **kwargs):
            return l1_distances(*args[:2])
        return func(*args, **kwargs)


def _are_boxes(*args: Any, p: float = 2.0, **_: object) -> bool:
    """Return True if a call of ``torch.cdist`` asks for L1 distances of boxes, that is, of four numbers each."""
    if len(args) < 2:
        return False
    p = args[2] if len(args) > 2 else p
    return p == 1 and args[0].shape[-1] == args[1].shape[-1] == SIDES
