"""Sizes of feature maps that act as numbers and as a tensor, for capturing a graph of any image size.

mmdet's transformers keep the sizes of their levels in a tensor, loop over it and make grids of the values. The values
of a tensor are unknown during a capture, but the sizes from which it was made are known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


class SymbolicSizes:
    """List of sizes that gives numbers when it is indexed or unpacked, and acts as an int64 tensor in other uses.

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

    def __iter__(self) -> Iterator[Any]:
        return iter(self.numbers)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, int):
            return self.numbers[index]
        return SymbolicSizes(self.numbers[index]) if isinstance(index, slice) else self.tensor[index]

    def tolist(self) -> list[Any]:
        """Return the sizes as numbers, as ``Tensor.tolist`` does."""
        return self.numbers

    def to(self, *_: object) -> SymbolicSizes:
        """Return the sizes unchanged; ``Tensor.to`` has nothing to do, because a graph is captured on one device."""
        return self

    def view(self, *shape: int) -> Any:
        """Reshape the sizes as ``Tensor.view`` does; the shape ``(-1, n)`` keeps them numbers, in rows of n.

        Any other shape gives a view of the tensor.
        """
        if len(shape) == 2 and shape[0] == -1:
            width = shape[1]
            return SymbolicSizes([self.numbers[i : i + width] for i in range(0, len(self.numbers), width)])
        return self.tensor.view(*shape)

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call a torch function with the sizes as a tensor; ``torch.cat`` of sizes alone joins them as numbers."""
        if function is torch.cat and all(isinstance(part, SymbolicSizes) for part in args[0]):
            return SymbolicSizes([number for part in args[0] for number in part])
        options = {name: _plain(value) for name, value in (kwargs or {}).items()}
        return function(*(_plain(arg) for arg in args), **options)


def _plain(argument: Any) -> Any:
    """Return an argument of a torch function with all sizes in it replaced by tensors, also inside lists and tuples."""
    if isinstance(argument, (list, tuple)):
        return type(argument)(_plain(part) for part in argument)
    return argument.tensor if isinstance(argument, SymbolicSizes) else argument
