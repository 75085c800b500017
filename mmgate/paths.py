"""The model inside its wrappers."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mmgate._environment import torch_alone


def own_model(model: Any) -> nn.Module:
    """Return the model that wrappers such as DistributedDataParallel are around."""
    while _is_wrapper(model):
        model = model.module
    return model


def _is_wrapper(model: nn.Module) -> bool:
    if isinstance(model, DistributedDataParallel) or torch_alone():
        return isinstance(model, DistributedDataParallel)
    from mmengine.model import is_model_wrapper

    return is_model_wrapper(model)
