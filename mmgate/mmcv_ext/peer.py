"""torchvision's CUDA operators, where it is installed and works. On CPUs ours are as fast as compiled ones."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

import torch
from torch import Tensor


def torchvision_ops(x: Tensor) -> ModuleType | None:
    """Return ``torchvision.ops`` if ``x`` is on a GPU and its kernels run there, else None."""
    return _of_cuda() if x.is_cuda else None


@functools.cache
def _of_cuda() -> ModuleType | None:
    # A torchvision for another torch fails at import or when it is called, and with errors of many classes.
    try:
        ops = importlib.import_module('torchvision.ops')
        ops.nms(torch.zeros(1, 4, device='cuda'), torch.zeros(1, device='cuda'), 0.5)
    except Exception:
        return None
    return ops
