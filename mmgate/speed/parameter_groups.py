"""An optimizer of few parameter groups: mmengine makes one for each parameter as soon as one differs."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from mmengine.optim import OptimWrapper, OptimWrapperDict
from mmengine.registry import OPTIMIZERS
from torch import nn
from torch.optim import Optimizer

from mmgate.registry import OPTIM_WRAPPER_CONSTRUCTORS

TORCH = tuple(int(part) for part in torch.__version__.split('.')[:2])


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class GroupedOptimWrapperConstructor:
    """Let another constructor make the optimizer, then merge its groups of equal settings.

    A Deformable DETR has 300 groups of two settings, and an optimizer launches its kernels group by group. What is
    computed stays the same, checkpoints from before the merge can be resumed, and schedulers and logs see the merged
    groups. The optimizer is fused where torch can and the config does not say ``fused=False``.

    Args:
        optim_wrapper_cfg: mmengine's optimizer wrapper config.
        paramwise_cfg: That of the other constructor, and its registered name under ``grouped``;
            ``'DefaultOptimWrapperConstructor'`` by default.
    """

    def __init__(self, optim_wrapper_cfg: dict[str, Any], paramwise_cfg: dict[str, Any] | None = None) -> None:
        options = dict(paramwise_cfg or {})
        self.host_type = options.pop('grouped', 'DefaultOptimWrapperConstructor')
        self.wrapper, self.options = dict(optim_wrapper_cfg), options or None

    def __call__(self, model: nn.Module) -> OptimWrapper | OptimWrapperDict:
        """Return the optimizer wrapper for ``model``."""
        cfg = dict(self.wrapper)
        if 'optimizer' in cfg and _can_fuse(cfg['optimizer'], model):
            cfg['optimizer'] = dict(cfg['optimizer'], fused=True)
        host = dict(type=self.host_type, optim_wrapper_cfg=cfg, paramwise_cfg=self.options)
        wrapper = OPTIM_WRAPPER_CONSTRUCTORS.build(host)(model)
        wrappers = wrapper.values() if isinstance(wrapper, OptimWrapperDict) else [wrapper]
        for one in wrappers:
            merge_groups(one.optimizer)
        return wrapper


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


def merge_groups(optimizer: Optimizer) -> None:
    """Merge the parameter groups of equal settings, and let states from before the merge be loaded.

    Groups keep the order of their first members.
    """
    before = optimizer.param_groups
    members: list[list[int]] = []
    settings: list[dict[str, Any]] = []
    for index, group in enumerate(before):
        own = {key: value for key, value in group.items() if key != 'params'}
        if own in settings:
            members[settings.index(own)].append(index)
        else:
            settings.append(own)
            members.append([index])
    sizes = [len(group['params']) for group in before]
    merged = [
        {'params': [p for index in indices for p in before[index]['params']], **own}
        for indices, own in zip(members, settings, strict=True)
    ]
    optimizer.param_groups[:] = merged

    def regroup(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        groups = state_dict['param_groups']
        if len(merged) < len(sizes) and [len(group['params']) for group in groups] == sizes:
            groups = [
                {**groups[indices[0]], 'params': [i for index in indices for i in groups[index]['params']]}
                for indices in members
            ]
        # whether it is fused is this run's to say
        own = [{'fused': group['fused']} if 'fused' in group else {} for group in optimizer.param_groups]
        if len(groups) == len(own):
            groups = [{**group, **fused} for group, fused in zip(groups, own, strict=True)]
        return {**state_dict, 'param_groups': groups}

    optimizer.register_load_state_dict_pre_hook(regroup)
