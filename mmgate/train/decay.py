"""Weight decay of what gates add: the one rule, for whatever constructs the optimizer."""

from __future__ import annotations

from typing import Any

from mmengine.optim import OptimWrapper, OptimWrapperDict
from torch import nn
from torch.optim import Optimizer

from mmgate.gates import gate_parameters
from mmgate.layers.base.init import undecayed_parameters
from mmgate.registry import OPTIM_WRAPPER_CONSTRUCTORS

GATES = 'mmgate.gates'  # in custom_keys


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class GateOptimWrapperConstructor:
    """Let another constructor make the optimizer, then take the weight decay off what gates declare as ``undecayed``.

    mmengine's own constructor exempts BatchNorm, InstanceNorm, GroupNorm and LayerNorm alone, those with a decay by
    layer go by a parameter's dimensions, and a key of ``custom_keys`` loses to any longer one, such as ``backbone``.

    Args:
        optim_wrapper_cfg: mmengine's optimizer wrapper config.
        paramwise_cfg: That of the other constructor, and its registered name under ``constructor``;
            ``'DefaultOptimWrapperConstructor'`` by default. ``custom_keys`` may have the key ``'mmgate.gates'``, which
            means every parameter that gates add, whatever its name.
    """

    def __init__(self, optim_wrapper_cfg: dict[str, Any], paramwise_cfg: dict[str, Any] | None = None) -> None:
        options = dict(paramwise_cfg or {})
        kind = options.pop('constructor', 'DefaultOptimWrapperConstructor')
        self.of_gates = None
        if GATES in options.get('custom_keys', {}):
            options['custom_keys'] = dict(options['custom_keys'])
            self.of_gates = options['custom_keys'].pop(GATES)
        self.host = OPTIM_WRAPPER_CONSTRUCTORS.build(
            dict(type=kind, optim_wrapper_cfg=optim_wrapper_cfg, paramwise_cfg=options or None)
        )

    def __call__(self, model: nn.Module) -> OptimWrapper | OptimWrapperDict:
        """Return the optimizer wrapper for ``model``."""
        if self.of_gates is not None:
            names = gate_parameters(getattr(model, 'module', model))  # mmengine's constructors, too, look inside DDP
            self.host.paramwise_cfg['custom_keys'] |= dict.fromkeys(names, self.of_gates)
        wrapper = self.host(model)
        spared = {id(parameter) for _, parameter in undecayed_parameters(model)}
        wrappers = wrapper.values() if isinstance(wrapper, OptimWrapperDict) else [wrapper]
        for one in wrappers:
            _spare(one.optimizer, spared)
        return wrapper


def _spare(optimizer: Optimizer, spared: set[int]) -> None:
    """Take the weight decay off the parameters of these ids, which may need groups of their own."""
    for group in list(optimizer.param_groups):
        if not group.get('weight_decay'):
            continue
        own = [id(parameter) in spared for parameter in group['params']]
        if all(own):
            group['weight_decay'] = 0.0
        elif any(own):
            rest, taken = _part(group, own, False), _part(group, own, True)
            group.update(rest)
            optimizer.add_param_group({**group, **taken, 'weight_decay': 0.0})


def _part(group: dict[str, Any], own: list[bool], taken: bool) -> dict[str, list[Any]]:
    """Return a group's parameters, and their names where a constructor lists them, that are spared or are not."""
    lists = [key for key in ('params', 'param_names') if len(group.get(key, ())) == len(own)]
    return {key: [value for value, is_own in zip(group[key], own, strict=True) if is_own is taken] for key in lists}
