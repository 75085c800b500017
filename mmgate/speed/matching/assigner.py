"""mmdet's Hungarian assigner with a single GPU synchronisation in each call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from mmdet.models.task_modules.assigners import AssignResult
from mmdet.models.task_modules.assigners import HungarianAssigner as MMDetHungarianAssigner
from mmengine.structures import InstanceData
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mmgate.registry import TASK_UTILS

from .pairs import BroadcastDistances, match_pairs, to_device


@TASK_UTILS.register_module()
class HungarianAssigner(MMDetHungarianAssigner):
    """Drop-in replacement for mmdet's HungarianAssigner, with equal results and one GPU synchronisation per call.

    mmdet's assigner waits five times in each call, that is, for each image and layer, and its heads six times more.
    Every head that takes mmdet's assigner takes this one: ``train_cfg=dict(assigner=dict(
    type='mmgate.HungarianAssigner'))``. Heads of boxes are faster with :func:`mmgate.speed.matching.MatchedOnce`.

    ``match_costs`` is mmdet's.
    """

    def assign(
        self,
        pred_instances: InstanceData,
        gt_instances: InstanceData,
        img_meta: dict[str, Any] | None = None,
        **kwargs: object,
    ) -> AssignResult:
        """Match Q predictions to the G objects of an image; arguments and result are those of mmdet.

        Raises:
            ConfigError: A cost is NaN or infinite; the message names the image and the cost.
        """
        queries = len(pred_instances)
        labels = gt_instances.labels
        if not len(gt_instances) or not queries:
            return as_result(labels.new_empty((2, 0), dtype=torch.long), queries, labels)
        with AsynchronousConstants():
            cost = cost_of(self, pred_instances, gt_instances, img_meta)
        parts = partial(named_costs, self, pred_instances, gt_instances, img_meta)
        pairs = match_pairs(cost.cpu(), image_name(img_meta), parts)
        matched = to_device(torch.from_numpy(pairs), labels.device)
        return as_result(matched, queries, labels)


@torch.no_grad()
def cost_of(
    assigner: MMDetHungarianAssigner, predictions: InstanceData, objects: InstanceData, meta: dict[str, Any] | None
) -> Tensor:
    """Compute the matching cost of each pair of prediction and object, ``(Q, G)``, on the predictions' device."""
    total = torch.stack([cost for _, cost in named_costs(assigner, predictions, objects, meta)]).sum(dim=0)
    # numpy has no bfloat16.
    return total.float() if total.dtype == torch.bfloat16 else total


def named_costs(
    assigner: MMDetHungarianAssigner, predictions: InstanceData, objects: InstanceData, meta: dict[str, Any] | None
) -> list[tuple[str, Tensor]]:
    """Compute each cost ``(Q, G)`` that an assigner adds up, with the name of its class."""
    given = dict(pred_instances=predictions, gt_instances=objects, img_meta=meta)
    with BroadcastDistances():
        return [(type(cost).__name__, cost(**given)) for cost in assigner.match_costs]


def image_name(meta: dict[str, Any] | None) -> str:
    """Return a name of an image for messages: its file or, if its meta information has none, its number."""
    meta = meta or {}
    return f'image {meta.get("img_path", meta.get("img_id", "without a name"))}'


def as_result(matched: Tensor, queries: int, labels: Tensor) -> AssignResult:
    """Turn matched pairs ``(2, N)`` into mmdet's AssignResult, on the device of the labels."""
    numbers = labels.new_zeros((queries,), dtype=torch.long)
    assigned = labels.new_full((queries,), -1, dtype=torch.long)
    if matched.numel():
        rows, columns = matched
        numbers[rows] = columns + 1
        assigned[rows] = labels[columns]
    return AssignResult(num_gts=len(labels), gt_inds=numbers, max_overlaps=None, labels=assigned)


class AsynchronousConstants(TorchFunctionMode):
    """Torch function mode in which ``tensor.new_tensor(numbers)`` and ``tensor.to(device)`` do not wait for the GPU.

    mmdet's costs, heads and losses make tensors of image sizes, counts and epsilons with the former, its detectors
    tensors of the sizes of feature maps with the latter.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call a torch function; ``new_tensor`` and ``to`` copy without waiting for the GPU."""
        kwargs = kwargs or {}
        moves = func is Tensor.to and not kwargs and len(args) == 2 and isinstance(args[1], torch.device)
        if moves and args[0].device.type == 'cpu':
            return to_device(*args)
        if func is not Tensor.new_tensor or not set(kwargs) <= {'dtype', 'device'}:
            return func(*args, **kwargs)
        like, numbers = args
        dtype = kwargs.get('dtype') or like.dtype
        device = kwargs.get('device') or like.device
        # Sizes of images on their device, where torch.vmap computes all images together.
        if isinstance(numbers, list) and numbers and all(isinstance(one, Tensor) and not one.dim() for one in numbers):
            return to_device(torch.stack(numbers).detach().to(dtype), device)
        # Numbers on a device may not have been computed yet.
        if isinstance(numbers, Tensor) and numbers.device.type != 'cpu':
            return func(*args, **kwargs)
        copy = numbers.detach().clone() if isinstance(numbers, Tensor) else torch.tensor(numbers, dtype=dtype)
        return to_device(copy.to(dtype), device)
