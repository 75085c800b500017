"""Optimizer wrapper constructors: merged groups, and settings for gates (learning rate, no weight decay)."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from mmengine.logging import MMLogger
from mmengine.optim import OptimWrapper, OptimWrapperDict
from mmengine.registry import OPTIMIZERS
from torch import nn
from torch.optim import Optimizer

from mmgate._environment import log
from mmgate.errors import ConfigError
from mmgate.gate import Gate, gate_classes, undecayed_parameters
from mmgate.registry import OPTIM_WRAPPER_CONSTRUCTORS
from mmgate.training import gate_parameters

GATES = 'mmgate.gates'  # in custom_keys
# The lists in a parameter group, which are joined as groups merge. Names of parameters are new in torch 2.6.
MEMBERS = ('params', 'param_names')
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
        self.constructor = self.options.pop(self.named, 'DefaultOptimWrapperConstructor')

    def __call__(self, model: nn.Module) -> OptimWrapper | OptimWrapperDict:
        """Build the optimizer wrapper for a model."""
        wrapper, options = self.settings(model)
        cfg = dict(type=self.constructor, optim_wrapper_cfg=wrapper, paramwise_cfg=options or None)
        with _frozen_in_one_line():
            built = OPTIM_WRAPPER_CONSTRUCTORS.build(cfg)(model)
        for wrapper in built.values() if isinstance(built, OptimWrapperDict) else [built]:
            if _is_sharded(wrapper.optimizer):
                log(
                    f'{type(wrapper.optimizer).__name__} has given its parameters to processes: its groups stay as '
                    'they are, without settings of their own for gates.',
                    logging.WARNING,
                )
                continue
            self.change(wrapper.optimizer, model)
            _merge(wrapper.optimizer)
        return built

    def settings(self, model: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the settings with which the other constructor builds the optimizer of a model.

        They are ``optim_wrapper_cfg``, with ``fused=True`` for the optimizer if that is possible, and
        ``paramwise_cfg``.
        """
        if 'optimizer' not in self.wrapper or not _can_fuse(self.wrapper['optimizer'], model):
            return self.wrapper, self.options
        return {**self.wrapper, 'optimizer': {**self.wrapper['optimizer'], 'fused': True}}, self.options

    def change(self, optimizer: Optimizer, model: nn.Module) -> None:
        """Change settings of the built optimizer's groups in place, before they are merged; here nothing."""


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
    of that class instead.

    Raises:
        ConfigError: A key names no class of gates.
    """

    named = 'constructor'

    def settings(self, model: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the other constructor's settings, without the key ``'mmgate.gates'``, which it does not know."""
        wrapper, options = super().settings(model)
        options = dict(options)
        keys = {name: key for name, key in (options.pop('custom_keys', None) or {}).items() if not _is_of_gates(name)}
        return wrapper, {**options, **({'custom_keys': keys} if keys else {})}

    def change(self, optimizer: Optimizer, model: nn.Module) -> None:
        """Apply the settings under ``'mmgate.gates'`` to gates, then take weight decay off the undecayed parameters."""
        keys = {name: key for name, key in (self.options.get('custom_keys') or {}).items() if _is_of_gates(name)}
        # The key of all gates comes first, then the keys of single classes.
        for name in sorted(keys):
            factors = dict(lr=keys[name].get('lr_mult'), weight_decay=keys[name].get('decay_mult'))
            settings = {name: optimizer.defaults[name] * by for name, by in factors.items() if by is not None}
            _set(optimizer, _parameters_of(name, model) if settings else (), **settings)
        _set(optimizer, [parameter for _, parameter in undecayed_parameters(model)], weight_decay=0.0)


@contextmanager
def _frozen_in_one_line() -> Iterator[None]:
    """Replace mmengine's warning for each frozen parameter by one line with their number.

    ``--train gates`` freezes hundreds of parameters, and as many warnings would hide the lines around them.
    """
    frozen = 0

    def keep(record: logging.LogRecord) -> bool:
        nonlocal frozen
        skipped = record.getMessage().endswith('is skipped since its requires_grad=False')
        frozen += skipped
        return not skipped

    logger = MMLogger.get_current_instance()
    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)
    if frozen:
        logger.info('mmgate: the optimizer leaves out %d frozen parameter tensors', frozen)


def _is_sharded(optimizer: Optimizer) -> bool:
    """Return True for torch's ZeroRedundancyOptimizer, whose groups another optimizer has, too, for each process."""
    return any(cls.__name__ == 'ZeroRedundancyOptimizer' for cls in type(optimizer).__mro__)


def _is_of_gates(key: str) -> bool:
    return key == GATES or key.startswith(f'{GATES}.')


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


def _set(optimizer: Optimizer, parameters: Iterable[nn.Parameter], **settings: float) -> None:
    """Change settings such as the learning rate of some parameters; split a group that has others, too."""
    chosen = {id(parameter) for parameter in parameters}
    for group in list(optimizer.param_groups):
        own = [id(parameter) in chosen for parameter in group['params']]
        if not any(own) or all(group.get(name, value) == value for name, value in settings.items()):
            continue
        taken = _part(group, own, True)
        group.update(_part(group, own, False))
        if group['params']:
            optimizer.add_param_group({**group, **taken, **settings})
        else:
            group.update(taken, **settings)


def _part(group: dict[str, Any], own: list[bool], taken: bool) -> dict[str, list[Any]]:
    """Return the part of a parameter group for which ``own`` equals ``taken``, with names if the group has any."""
    lists = [key for key in MEMBERS if len(group.get(key, ())) == len(own)]
    return {key: [value for value, is_own in zip(group[key], own, strict=True) if is_own is taken] for key in lists}


def _merge(optimizer: Optimizer) -> None:
    """Merge an optimizer's parameter groups of equal settings, in the order of their first members."""
    settings: list[dict[str, Any]] = []
    merged: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        own = {key: value for key, value in group.items() if key not in MEMBERS}
        # Optimizers that were given names have them in every group.
        members = {key: list(group[key]) for key in MEMBERS if key in group}
        if own not in settings:
            settings.append(own)
            merged.append({**members, **own})
            continue
        for key, values in members.items():
            merged[settings.index(own)][key] += values
    optimizer.param_groups[:] = merged


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
