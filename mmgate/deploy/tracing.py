"""Replace functions of torch and mm packages that cannot be captured in a graph of any batch and size.

The original functions read a symbolic size as a float, a tensor's memory layout or its values, which would fix the
sizes of the graph. Each replacement is used while :func:`traceable` is open, and not before or after.
"""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from mmgate._environment import available


class SymbolicSizes:
    """List of sizes that gives numbers when it is indexed or unpacked, and acts as an int64 tensor in other uses.

    mmdet's transformers keep the sizes of their levels in a tensor, loop over it and make grids of the values. The
    values of a tensor are unknown during a capture, but the sizes from which it was made are known.

    Args:
        numbers: A list of sizes, or a list of such lists; they may be symbolic.
    """

    def __init__(self, numbers: Sequence[Any]) -> None:
        self.numbers = list(numbers)

    @property
    def tensor(self) -> Tensor:
        """The sizes as an int64 tensor in the captured graph."""
        if isinstance(self.numbers[0], list):
            return torch.stack([SymbolicSizes(row).tensor for row in self.numbers])
        return torch.stack([torch.scalar_tensor(number, dtype=torch.int64) for number in self.numbers])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor, name)

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, int):
            return self.numbers[index]
        return SymbolicSizes(self.numbers[index]) if isinstance(index, slice) else self.tensor[index]

    def to(self, *_: object) -> SymbolicSizes:
        """Return the sizes unchanged: a graph is captured on one device."""
        return self

    def view(self, *shape: int) -> SymbolicSizes:
        """Return the sizes in rows of n for the shape ``(-1, n)``."""
        _, width = shape
        return SymbolicSizes([self.numbers[i : i + width] for i in range(0, len(self.numbers), width)])

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a torch function with the sizes as a tensor; ``torch.cat`` of sizes alone joins them as numbers."""
        if function is torch.cat and all(isinstance(part, SymbolicSizes) for part in args[0]):
            return SymbolicSizes([number for part in args[0] for number in part])
        args, kwargs = tree_map_only(SymbolicSizes, lambda sizes: sizes.tensor, (args, kwargs or {}))
        return function(*args, **kwargs)


def project(q: Tensor, k: Tensor, v: Tensor, w: Tensor, b: Tensor | None = None) -> list[Tensor]:
    """Project query, key and value by the thirds of one weight ``(3 C, C)`` and bias, as torch's attention does."""
    biases = (None,) * 3 if b is None else b.chunk(3)
    # The layout of a clone is known.
    inputs = [x.clone(memory_format=torch.contiguous_format) for x in (q, k, v)]
    return [F.linear(x, weight, bias) for x, weight, bias in zip(inputs, w.chunk(3), biases, strict=True)]


def adaptive_avg_pool2d(x: Tensor, output_size: int | Sequence[int | None]) -> Tensor:
    """Pool maps ``(..., H, W)`` to averages as torch's function of this name does, by two matrix products."""
    height, width = (output_size, output_size) if isinstance(output_size, int) else output_size
    rows = _means(x.shape[-2] if height is None else height, x.shape[-2], x)
    columns = _means(x.shape[-1] if width is None else width, x.shape[-1], x)
    return rows @ x @ columns.t()


def _means(cells: int, size: int, like: Tensor) -> Tensor:
    """Return the matrix ``(c, s)`` that averages s pixels in c cells, as adaptive pooling divides them.

    Row i averages the pixels from ``floor(i s / c)`` to ``ceil((i + 1) s / c)``.
    """
    cell = torch.arange(cells, device=like.device)[:, None]
    pixel = torch.arange(size, device=like.device)
    inside = (pixel >= cell * size // cells) & (pixel < -(-(cell + 1) * size // cells))
    return inside.to(like.dtype) / inside.sum(1, keepdim=True)


def window_reverse(self: Any, windows: Tensor, H: int, W: int) -> Tensor:
    """Put Swin's windows ``(B H/w W/w, w, w, C)`` back into maps ``(B, H, W, C)``, like mmdet's method of this name."""
    side = self.window_size
    rows = windows.view(-1, H // side, W // side, side, side, windows.shape[-1])
    return rows.transpose(2, 3).reshape(-1, H, W, windows.shape[-1])


def upsample(self: Any, x: Tensor) -> Tensor:
    """Resize a map as mmseg's ``Upsample`` does; a whole factor multiplies the sides as an integer."""
    size = self.size
    factor = self.scale_factor
    if not size:
        size = [side * int(factor) if factor.is_integer() else int(side * factor) for side in x.shape[-2:]]
    return F.interpolate(x, size, None, self.mode, self.align_corners)


def linspace(start: float, end: float, steps: int, **options: Any) -> Tensor:
    """Return evenly spaced values as :func:`torch.linspace` does; the number of steps may be symbolic."""
    # With a single step, the only value is the start.
    last = torch.scalar_tensor(steps - 1, **options).clamp(min=1)
    span = torch.scalar_tensor(end, **options) - start
    return start + torch.arange(steps, **options) * (span / last)


def replacements() -> Iterator[tuple[Any, str, Any]]:
    """Yield each function that is replaced while a graph is captured: its owner, its name, and the replacement."""
    yield F, '_in_projection_packed', project
    yield F, 'adaptive_avg_pool2d', adaptive_avg_pool2d
    # mmdet takes the sizes of its levels from it, and makes grids of the values.
    yield torch, '_shape_as_tensor', lambda tensor: SymbolicSizes(tensor.shape)
    yield torch, 'linspace', linspace
    for package in filter(available, ('mmdet', 'mmseg')):
        swin = importlib.import_module(f'{package}.models.backbones.swin')
        yield swin.ShiftWindowMSA, 'window_reverse', window_reverse
    if available('mmseg'):
        from mmseg.models.utils import Upsample

        yield Upsample, 'forward', upsample


@contextmanager
def traceable() -> Iterator[None]:
    """Replace functions inside a ``with`` block so that a model can be captured as a graph and written."""
    from torch.fx.experimental import _config as symbols

    with ExitStack() as stack:
        for owner, name, value in replacements():
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)
        # The exporter and its optimizer log their progress.
        stack.callback(logging.disable, logging.root.manager.disable)
        logging.disable(logging.WARNING)
        stack.enter_context(torch.no_grad())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter('ignore')
        # Outputs of fused and plain kernels differ in their layout, and a view that fits one fails on the other.
        stack.enter_context(torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH))
        # With this, the graph is valid for sides of 1 pixel, too.
        stack.enter_context(symbols.patch(backed_size_oblivious=True))  # type: ignore[attr-defined]
        yield
