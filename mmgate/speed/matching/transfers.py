"""Numbers of the host that reach the device without a wait."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class AsynchronousConstants(TorchFunctionMode):
    """Within it ``tensor.new_tensor(numbers)`` does not wait for the device, which it otherwise does.

    mmdet's costs, heads and losses make image sizes, counts and epsilons into tensors that way.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call ``func``, or what stands in its place."""
        kwargs = dict(kwargs or {})
        if func is not Tensor.new_tensor or len(args) != 2 or not set(kwargs) <= {'dtype', 'device'}:
            return func(*args, **kwargs)
        like, numbers = args
        dtype, device = kwargs.get('dtype') or like.dtype, torch.device(kwargs.get('device') or like.device)
        if not isinstance(numbers, Tensor):
            return to_device(torch.tensor(numbers, dtype=dtype), device)
        if numbers.device.type != 'cpu':  # the host would read what has not arrived
            return func(*args, **kwargs)
        return to_device(numbers.detach().clone().to(dtype), device)


def to_device(numbers: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the host on ``device``; CUDA keeps a copy of pageable memory before it returns."""
    return numbers.to(device, non_blocking=True)
