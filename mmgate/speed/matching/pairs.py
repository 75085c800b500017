"""Solve the assignment problems of a training step, and make small tensors without waiting for the GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from mmdet.models.task_modules.assigners import HungarianAssigner
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mmgate.errors import ConfigError


def match_pairs(assigner: HungarianAssigner, total: Tensor, costs: Tensor, place: str) -> np.ndarray:
    """Solve the assignment problem: return pairs of prediction and object with the least total cost, ``(2, N)``.

    Predictions are in ascending order.

    Args:
        assigner: The assigner that has the costs.
        total: Total cost ``(Q, G)`` of predictions and objects, on the CPU.
        costs: The costs ``(C, Q, G)`` that it adds up, on any device.
        place: Name of the predictions in the error, such as ``'layer 2 of 6, image a.jpg'``.

    Raises:
        ConfigError: A cost is NaN or minus infinity, or no pairs of finite cost match all; the message names the costs.
    """
    try:
        return np.stack(linear_sum_assignment(total.numpy()))
    except ValueError as error:
        counts = (~costs.isfinite()).sum((1, 2)).tolist()
        faults = [
            f'{type(cost).__name__} is NaN or infinite in {count} of {total.numel()} pairs'
            for cost, count in zip(assigner.match_costs, counts, strict=True)
            if count
        ]
        raise ConfigError(
            f'The predictions of {place} cannot be matched to objects: {", ".join(faults)}. In mixed precision in '
            "float16 numbers above 65504 are infinite: train in bfloat16 (optim_wrapper.dtype='bfloat16') or without "
            '--amp. Otherwise the training has diverged, or a box of an object is no number: lower the learning rate, '
            'clip gradients (optim_wrapper.clip_grad), and look at the annotations. Weights that are NaN stay so: go '
            'on from a checkpoint before that.'
        ) from error


def image_name(meta: dict[str, Any]) -> str:
    """Return a name of an image for messages: its file or, if its meta information has none, its number."""
    return f'image {meta.get("img_path", meta.get("img_id", "without a name"))}'


def assigns_by(head: Any, costs: Sequence[type]) -> bool:
    """Return True if a head assigns as mmdet's HungarianAssigner does, by costs of these classes."""
    assigner: Any = getattr(head, 'assigner', None)
    return getattr(type(assigner), 'assign', None) is HungarianAssigner.assign and all(
        type(cost) in costs for cost in assigner.match_costs
    )


def padded(firsts: np.ndarray) -> np.ndarray:
    """Return the indices of each image's objects ``(B, G)``, filled up with any.

    Args:
        firsts: The index of the first object of each image, and of the end, ``(B + 1,)``.
    """
    return np.minimum(firsts[:-1, None] + np.arange(np.diff(firsts).max()), firsts[-1] - 1)


def to_device(numbers: np.ndarray | Tensor, device: torch.device | str) -> Tensor:
    """Copy numbers of the CPU to a device without waiting for the GPU; CUDA keeps a copy of pageable memory."""
    return torch.as_tensor(numbers).to(device, non_blocking=True)


class AsynchronousConstants(TorchFunctionMode):
    """Torch function mode in which ``tensor.new_tensor(numbers)`` and ``tensor.to(device)`` do not wait for the GPU.

    mmdet's costs and losses make tensors of epsilons and weights with the former, its detectors tensors of the sizes of
    feature maps with the latter, inside of functions that have no argument for them.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call a torch function; ``new_tensor`` and ``to`` copy without waiting for the GPU."""
        kwargs = kwargs or {}
        if len(args) == 2 and set(kwargs) <= {'device'}:
            own, given = args
            if func is Tensor.to and isinstance(given, torch.device) and own.device.type == 'cpu':
                return to_device(own, given)
            plain = isinstance(given, list) and all(isinstance(one, (int, float)) for one in given)
            # The weights of classes in DETR's loss are a tensor.
            of_cpu = isinstance(given, Tensor) and given.device.type == 'cpu'
            if func is Tensor.new_tensor and (plain or of_cpu):
                copy = torch.as_tensor(given, dtype=own.dtype).detach().clone()
                return to_device(copy, kwargs.get('device', own.device))
        return func(*args, **kwargs)
