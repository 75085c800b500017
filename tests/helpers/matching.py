"""Objects, predictions and costs to match, and a count of what waits for a CUDA device."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from mmengine.structures import InstanceData
from torch import Tensor
from torch.overrides import TorchFunctionMode

CLASSES, QUERIES, LAYERS = 5, 12, 3
BOXES = [dict(type='BBoxL1Cost', weight=5.0, box_format='xywh'), dict(type='IoUCost', iou_mode='giou', weight=2.0)]
COSTS = {
    'focal': [dict(type='FocalLossCost', weight=2.0), *BOXES],
    'softmax': [dict(type='ClassificationCost', weight=1.0), *BOXES],
    'one': dict(type='BBoxL1Cost'),
    'corners_and_iou': [dict(type='BBoxL1Cost'), dict(type='IoUCost', iou_mode='iou')],
    'masks': [
        dict(type='CrossEntropyLossCost', use_sigmoid=True),
        dict(type='DiceCost', pred_act=True),
        dict(type='FocalLossCost', binary_input=True),
    ],
}


class Waits(TorchFunctionMode):
    """Counts what waits for a CUDA device: values and sizes that the host needs, copies there or back."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.__name__
        always = {'cpu', 'numpy', 'item', 'tolist', '__bool__', '__int__', '__float__', 'new_tensor'}
        of_unknown_size = {'nonzero', 'unique', 'masked_select', '_unique2', 'argwhere'}
        copies = name == 'to' and not kwargs.get('non_blocking') and any(isinstance(x, torch.device) for x in args)
        masks = name == '__getitem__' and isinstance(args[1], Tensor) and args[1].dtype == torch.bool
        own = name == 'numpy' and args[0].device.type == 'cpu' and not args[0].requires_grad
        if (name in always | of_unknown_size and not own) or copies or masks:
            self.counts[name] += 1
        return func(*args, **kwargs)


def objects(generator: torch.Generator, count: int) -> InstanceData:
    corners = torch.rand(count, 2, 2, generator=generator).sort(1).values * torch.tensor([96.0, 64.0])
    labels = torch.randint(0, CLASSES, (count,), generator=generator)
    masks = (torch.rand(count, 6, 7, generator=generator) > 0.5).float()
    return InstanceData(bboxes=corners.flatten(1), labels=labels, masks=masks)


def predictions(generator: torch.Generator, count: int) -> InstanceData:
    boxes = objects(generator, count).bboxes
    scores = torch.randn(count, CLASSES + 1, generator=generator)
    return InstanceData(scores=scores, bboxes=boxes, masks=torch.randn(count, 6, 7, generator=generator))


META = dict(img_shape=(64, 96), img_id=0)
