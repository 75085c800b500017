"""An optimizer of few parameter groups: mmengine makes one for each parameter as soon as one differs."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from mmengine.registry import OPTIMIZERS
from torch import nn
from torch.optim import Optimizer

from mmgate.registry import OPTIM_WRAPPER_CONSTRUCTORS
from mmgate.train.decay import ChangesGroups

TORCH = tuple(int(part) for part in torch.__version__.split('.')[:2])


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class GroupedOptimWrapperConstructor(ChangesGroups):
    """Merge the groups of equal settings, whichever constructor makes the optimizer.

    A Deformable DETR has 300 groups of two settings, and an optimizer launches its kernels group by group. What is
    computed stays the same, and schedulers, logs and checkpoints see the merged groups: a run is resumed with the
    constructor that it began with. The optimizer is fused where torch can and the config does not say ``fused=False``.

    ``paramwise_cfg`` is the other constructor's, with its registered name under ``grouped``.
    """

    named = 'grouped'

    def settings(self, model: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return them with the fused form of the optimizer, where it can be asked for."""
        if 'optimizer' not in self.wrapper or not _can_fuse(self.wrapper['optimizer'], model):
            return self.wrapper, self.options
        return {**self.wrapper, 'optimizer': {**self.wrapper['optimizer'], 'fused': True}}, self.options

    def change(self, optimizer: Optimizer, model: nn.Module) -> None:
        """Merge; groups keep the order of their first members."""
        settings: list[dict[str, Any]] = []
        members: list[list[nn.Parameter]] = []
        for group in optimizer.param_groups:
            own = {key: value for key, value in group.items() if key != 'params'}
            if own not in settings:
                settings.append(own)
                members.append([])
            members[settings.index(own)] += group['params']
        optimizer.param_groups[:] = [{'params': params, **own} for params, own in zip(members, settings, strict=True)]


def _can_fuse(optimizer: dict[str, Any], model: nn.Module) -> bool:
    """Return whether to ask for the fused form: the optimizer has it, the parameters are where torch has it."""
    if {'fused', 'foreach', 'capturable', 'differentiable'} & set(optimizer):
        return False
    kind = optimizer['type']
    kind = OPTIMIZERS.get(kind) if isinstance(kind, str) else kind
    if kind is None or 'fused' not in inspect.signature(kind).parameters:
        return False
    devices = {parameter.device.type for parameter in model.parameters()}
    return devices == {'cuda'} or (devices == {'cpu'} and TORCH >= (2, 4))
