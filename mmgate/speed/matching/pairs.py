"""Pairs of least cost, and the L1 costs of boxes, on no package but torch and scipy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.overrides import TorchFunctionMode

# The width of a box, for which the order of the sum is known.
SIDES = 4
NARROW = (torch.float16, torch.bfloat16)


def match_pairs(cost: Tensor) -> np.ndarray:
    """Return the pairs of least total cost ``(2, N)``: predictions, ascending, and their objects.

    Args:
        cost: Costs ``(Q, G)`` of predictions and objects, on the CPU.

    Raises:
        ValueError: A cost is NaN or minus infinity.
    """
    return np.stack(linear_sum_assignment(cost.numpy()))


def to_device(numbers: Tensor, device: torch.device | str) -> Tensor:
    """Move a CPU tensor to ``device`` without a wait; CUDA keeps a copy of pageable memory."""
    return numbers.to(device, non_blocking=True)


def l1_distances(first: Tensor, second: Tensor) -> Tensor:
    """Return the L1 distances ``(..., Q, G)`` of boxes, bit for bit those of ``torch.cdist(first, second, p=1)``.

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
    """Mode in which ``torch.cdist`` computes the L1 distances of boxes by :func:`l1_distances`.

    For every pair torch.cdist starts a block of 256 threads on a GPU, of which 4 have a number to add.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call ``func``, or add up the distances if it is ``torch.cdist`` of boxes with ``p=1``."""
        kwargs = kwargs or {}
        if func is torch.cdist and _are_boxes(*args, **kwargs):
            return l1_distances(*args[:2])
        return func(*args, **kwargs)


def _are_boxes(*args: Any, p: float = 2.0, **_: object) -> bool:
    """Return True if the arguments of ``torch.cdist`` are boxes, and ask for their L1 distances."""
    if len(args) < 2:
        return False
    p = args[2] if len(args) > 2 else p
    return p == 1 and args[0].shape[-1] == args[1].shape[-1] == SIDES
