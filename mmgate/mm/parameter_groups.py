"""Optimizer wrapper constructors: merged groups, and settings for gates (learning rate, no weight decay)."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from mmengine.logging import MMLogger
from mmengine.optim import OptimWrapper, OptimWrapperDict
from mmengine.registry import OPTIMIZERS
from torch import nn
from torch.optim import Optimizer

from mmgate._environment import log
from mmgate.errors import ConfigError
from mmgate.gate import GATE_NAME, Gate, gate_classes, undecayed_parameters
from mmgate.registry import OPTIM_WRAPPER_CONSTRUCTORS
from mmgate.training import gate_parameters

from .config_file import type_name

GATES = 'mmgate.gates'  # in custom_keys
DEFAULT = 'DefaultOptimWrapperConstructor'
TORCH = tuple(int(part) for part in torch.__version__.split('.')[:2])


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class GroupedOptimWrapperConstructor:
    """Optimizer constructor that merges parameter groups of equal settings, after any other one, for faster steps.

    mmengine makes a group of each parameter as soon as one differs, 300 of two settings in a Deformable DETR, and an
    optimizer launches its kernels group by group. Every parameter keeps its settings. Schedulers, logs and checkpoints
    see the merged groups: a run that began without this constructor is resumed without it. The optimizer is fused where
    torch can and the config does not set ``fused=False``; results are the same up to rounding. torch's
    ZeroRedundancyOptimizer stays as the other constructor makes it, which the log says.

    Args:
        optim_wrapper_cfg: mmengine's optimizer wrapper config.
        paramwise_cfg: The other constructor's ``paramwise_cfg``, and its registered name under ``grouped``;
            ``'DefaultOptimWrapperConstructor'`` by default.
    """

    named = 'grouped'

    def __init__(self, optim_wrapper_cfg: dict[str, Any], paramwise_cfg: dict[str, Any] | None = None) -> None:
        self.wrapper = dict(optim_wrapper_cfg)
        self.options = dict(paramwise_cfg or {})
        self.constructor = self.options.pop(self.named, DEFAULT)

    def __call__(self, model: nn.Module) -> OptimWrapper | OptimWrapperDict:
        """Build the optimizer wrapper for a model."""
        wrapper = self.wrapper
        if 'optimizer' in wrapper and _can_fuse(wrapper['optimizer'], model):
            wrapper = {**wrapper, 'optimizer': {**wrapper['optimizer'], 'fused': True}}
        cfg = dict(type=self.constructor, optim_wrapper_cfg=wrapper, paramwise_cfg=self.options or None)
        logger = MMLogger.get_current_instance()
        logger.addFilter(_is_of_no_frozen_parameter)
        try:
            built = OPTIM_WRAPPER_CONSTRUCTORS.build(cfg)(model)
        finally:
            logger.removeFilter(_is_of_no_frozen_parameter)
        for each in built.values() if isinstance(built, OptimWrapperDict) else [built]:
            # Another optimizer, for the share of this process, has its groups, too.
            if any(cls.__name__ == 'ZeroRedundancyOptimizer' for cls in type(each.optimizer).__mro__):
                log(
                    f'{type(each.optimizer).__name__} has given its parameters to processes: its groups stay as they '
                    'are, without settings of their own for gates.',
                    logging.WARNING,
                )
            else:
                _regroup(each.optimizer, self.changes(model, each.optimizer.defaults))
        return built

    def changes(self, model: nn.Module, defaults: Mapping[str, float]) -> dict[int, dict[str, float]]:
        """Return settings, by ``id`` of the parameter, that replace those of the other constructor; here none.

        Args:
            model: The model.
            defaults: The optimizer's settings of parameters without any.
        """
        return {}


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class GateOptimWrapperConstructor(GroupedOptimWrapperConstructor):
    """Optimizer constructor for gated models: no weight decay on some parameters of gates, another learning rate.

    It runs after any other constructor, and merges groups as :class:`GroupedOptimWrapperConstructor` does. Gates
    declare in ``undecayed`` which of their parameters get no weight decay: scalars, norms, positions and some biases.

    mmengine's default constructor exempts only BatchNorm, InstanceNorm, GroupNorm and LayerNorm, constructors with
    layer-wise decay go by a parameter's dimensions, and a longer key of ``custom_keys``, such as ``backbone``, wins
    over a shorter one.

    ``paramwise_cfg`` is the other constructor's, with its registered name under ``constructor``. Its ``custom_keys``
    may have the key ``'mmgate.gates'``, whose ``lr_mult`` and ``decay_mult`` apply to every parameter of a gate, even
    if the other constructor has no ``custom_keys``; and keys such as ``'mmgate.gates.SDPAGate'``, which apply to gates
    of that class instead. Any other key gives a gate a learning rate by its host's name, unless it names the gate: the
    ``head`` of mmseg's configs is no part of ``gate.head_norm``.

    Raises:
        ConfigError: A key that begins with ``mmgate`` names neither all gates nor a class of them.
    """

    named = 'constructor'

    def __init__(self, optim_wrapper_cfg: dict[str, Any], paramwise_cfg: dict[str, Any] | None = None) -> None:
        super().__init__(optim_wrapper_cfg, paramwise_cfg)
        keys = _joined(self.options.pop('custom_keys', None) or {})
        self.keys = {name: key for name, key in keys.items() if name == GATES or name.startswith(f'{GATES}.')}
        others = {name: key for name, key in keys.items() if name not in self.keys}
        if unknown := [name for name in others if name.partition('.')[0] == 'mmgate']:
            raise ConfigError(
                f'custom_keys: {unknown[0]} is none; {GATES} is for all gates, {GATES}.CLASS for a class.'
            )
        if others:
            self.options['custom_keys'] = others

    def changes(self, model: nn.Module, defaults: Mapping[str, float]) -> dict[int, dict[str, float]]:
        """Return the settings of gates under ``'mmgate.gates'``, and no weight decay for undecayed parameters."""
        found = self._rates_of_hosts(model, defaults['lr']) if type_name(dict(type=self.constructor)) == DEFAULT else {}
        # The key of all gates comes first, then the keys of single classes.
        for name in sorted(self.keys):
            factors = dict(lr=self.keys[name].get('lr_mult'), weight_decay=self.keys[name].get('decay_mult'))
            settings = {setting: defaults[setting] * by for setting, by in factors.items() if by is not None}
            for parameter in _parameters_of(name, model):
                found.setdefault(id(parameter), {}).update(settings)
        for _, parameter in undecayed_parameters(model):
            found.setdefault(id(parameter), {})['weight_decay'] = 0.0
        return found

    def _rates_of_hosts(self, model: nn.Module, base: float) -> dict[int, dict[str, float]]:
        """Return the learning rates of those parameters of gates in whose own names mmengine finds another key."""
        factors = self.options.get('custom_keys') or {}
        keys = sorted(sorted(factors), key=len, reverse=True)  # mmengine takes the first that is anywhere in a name
        found = {}
        for name, parameter in gate_parameters(model).items():
            host = name[: name.find(f'.{GATE_NAME}.') + 1]
            matched = next((key for key in keys if key in name), '')
            if matched not in host and GATE_NAME not in matched:
                factor = next((factors[key].get('lr_mult', 1.0) for key in keys if key in host), 1.0)
                found[id(parameter)] = dict(lr=base * factor)
        return found


def _joined(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``custom_keys`` with the keys of gates in one piece: ``--cfg-options`` splits them at their points."""
    joined = dict(keys)
    split = joined.get('mmgate')
    if isinstance(split, Mapping) and isinstance(split.get('gates'), Mapping) and len(split) == 1:
        del joined['mmgate']
        of_all = {name: value for name, value in split['gates'].items() if not isinstance(value, Mapping)}
        of_classes = {f'{GATES}.{name}': value for name, value in split['gates'].items() if name not in of_all}
        for name, value in {**({GATES: of_all} if of_all else {}), **of_classes}.items():
            joined[name] = {**joined.get(name, {}), **value}
    return joined


def _is_of_no_frozen_parameter(record: logging.LogRecord) -> bool:
    """Return False for mmengine's warning of a frozen parameter: hundreds would hide the lines around them."""
    return not record.getMessage().endswith('is skipped since its requires_grad=False')


def _parameters_of(key: str, model: nn.Module) -> Iterable[nn.Parameter]:
    """Return the parameters of all gates of a model, or of the gates of one class, as a ``custom_keys`` key says.

    Raises:
        ConfigError: There is no such class.
    """
    if key == GATES:
        return gate_parameters(model).values()
    name = key.removeprefix(f'{GATES}.')
    known = {cls.__name__ for cls in gate_classes()}
    if name not in known:
        raise ConfigError(f'custom_keys: {key} names no gate; classes of gates are {", ".join(sorted(known))}.')
    found = [module for module in model.modules() if isinstance(module, Gate) and type(module).__name__ == name]
    return [parameter for module in found for parameter in module.parameters()]


def _regroup(optimizer: Optimizer, changes: Mapping[int, Mapping[str, float]]) -> None:
    """Change settings of some parameters, and make one group of parameters of equal settings, in their order."""
    groups: list[tuple[dict[str, Any], dict[str, list[Any]]]] = []
    for group in optimizer.param_groups:
        # Optimizers that were given names, as torch 2.6 and newer take them, have them in every group.
        names = group.get('param_names', [])
        shared = {key: value for key, value in group.items() if key not in ('params', 'param_names')}
        for place, parameter in enumerate(group['params']):
            own = changes.get(id(parameter), {})
            settings = {key: own.get(key, value) for key, value in shared.items()}
            members = next((members for other, members in groups if other == settings), None)
            if members is None:
                members = dict(params=[], **({'param_names': []} if names else {}))
                groups.append((settings, members))
            members['params'].append(parameter)
            if names:
                members['param_names'].append(names[place])
    optimizer.param_groups[:] = [{**members, **settings} for settings, members in groups]


def _can_fuse(optimizer: dict[str, Any], model: nn.Module) -> bool:
    """Return True if the optimizer has a fused implementation here and the config does not choose another."""
    if {'fused', 'foreach', 'capturable', 'differentiable'} & set(optimizer):
        return False
    cls = optimizer['type']
    cls = OPTIMIZERS.get(cls) if isinstance(cls, str) else cls
    if cls is None or 'fused' not in inspect.signature(cls).parameters:
        return False
    devices = {parameter.device.type for parameter in model.parameters()}
    return devices == {'cuda'} or (devices == {'cpu'} and TORCH >= (2, 4))
