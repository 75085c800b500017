"""Objects to match, noise of denoising queries, and a count of what waits for a CUDA device."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from mmengine.structures import InstanceData
from torch import Tensor
from torch.overrides import TorchFunctionMode


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


def objects(generator: torch.Generator, count: int, classes: int = 5) -> InstanceData:
    """Return boxes in an image of 64 x 96, masks of 32 x 36, and labels."""
    corners = torch.rand(count, 2, 2, generator=generator).sort(1).values * torch.tensor([96.0, 64.0])
    labels = torch.randint(0, classes, (count,), generator=generator)
    masks = (torch.rand(count, 32, 36, generator=generator) > 0.5).long()
    return InstanceData(bboxes=corners.flatten(1), labels=labels, masks=masks)


def draw_boxes_anew(generator: Any) -> None:
    """Seed the noise of boxes. Before it mmdet draws as many numbers as labels are replaced, ours one a label."""
    boxes = generator.generate_dn_bbox_query
    generator.generate_dn_bbox_query = lambda *args: (torch.manual_seed(1), boxes(*args))[1]
