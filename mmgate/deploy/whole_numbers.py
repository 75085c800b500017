"""Sizes that hosts compute as floats, by whole numbers: a float is one number to a graph, and settles what it is of."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from mmgate._environment import available

from .replaced import replaced

HOSTS = ('mmdet', 'mmseg')


def window_reverse(self: Any, windows: Tensor, H: Any, W: Any) -> Tensor:
    """Return maps ``(B, H, W, C)`` of Swin's windows ``(B H/w W/w, w, w, C)``, as the hosts' method of this name."""
    side = self.window_size
    rows = windows.view(-1, H // side, W // side, side, side, windows.shape[-1])
    return rows.transpose(2, 3).reshape(-1, H, W, windows.shape[-1])


def upsample(forward: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    """Return a forward of mmseg's ``Upsample`` that multiplies sides by a whole factor as whole numbers."""

    def whole(self: Any, x: Tensor) -> Tensor:
        factor = self.scale_factor
        if self.size or not isinstance(factor, float) or not factor.is_integer():
            return forward(self, x)
        size = [side * int(factor) for side in x.shape[-2:]]
        return F.interpolate(x, size, None, self.mode, self.align_corners)

    return whole


@contextmanager
def whole_numbers() -> Iterator[None]:
    """Let the hosts compute sizes so."""
    with ExitStack() as stack:
        for host in filter(available, HOSTS):
            swin = importlib.import_module(f'{host}.models.backbones.swin')
            stack.enter_context(replaced(swin.ShiftWindowMSA, 'window_reverse', window_reverse))
        if available('mmseg'):
            from mmseg.models.utils import Upsample

            stack.enter_context(replaced(Upsample, 'forward', upsample(Upsample.forward)))
        yield
