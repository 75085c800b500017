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
    computed stays the same, checkpoints from before the merge can be resumed, and schedulers and logs see the merged
    groups. The optimizer is fused where torch can and the config does not say ``fused=False``.

    ``paramwise_cfg`` is the other constructor's, with its registered name under ``grouped``.
    """

    named = 'grouped'

    def settings(self, model: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return them with the fused form of the optimizer, where it can be asked for."""
        if 'optimizer' not in self.wrapper or not _can_fuse(self.wrapper['optimizer'], model):
            return self.wrapper, self.options
        return {**self.wrapper, 'optimizer': {**self.wrapper['optimizer'], 'fused': True}}, self.options

    def change(self, optimizer: Optimizer, model: nn.Module) -> None:
        """Merge, and let states from before the merge be loaded; groups keep the order of their first members."""
        before = optimizer.param_groups
        settings: list[dict[str, Any]] = []
        members: list[list[int]] = []
        for index, group in enumerate(before):
            own = {key: value for key, value in group.items() if key != 'params'}
            if own in settings:
                members[settings.index(own)].append(index)
            else:
                settings.append(own)
                members.append([index])
        sizes = [len(group['params']) for group in before]
        optimizer.param_groups[:] = _merged(before, members)

        def regroup(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
            groups = state_dict['param_groups']
            if len(members) < len(sizes) and [len(group['params']) for group in groups] == sizes:
                groups = _merged(groups, members)
            # whether it is fused is this run's to say
            own = [{'fused': group['fused']} if 'fused' in group else {} for group in optimizer.param_groups]
            if len(groups) == len(own):
                groups = [{**group, **fused} for group, fused in zip(groups, own, strict=True)]
            return {**state_dict, 'param_groups': groups}

        optimizer.register_load_state_dict_pre_hook(regroup)


def _merged(groups: list[dict[str, Any]], members: list[list[int]]) -> list[dict[str, Any]]:
    """Return a group with the settings of the first and the parameters of all, for each list of indices."""
    return [{**groups[own[0]], 'params': [p for index in own for p in groups[index]['params']]} for own in members]


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
