"""Train the gates of a model with all other parameters frozen."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from torch import nn

from mmgate._environment import log
from mmgate.adapter import gated_modules
from mmgate.errors import ConfigError
from mmgate.frozen import averaged_copies
from mmgate.gate import Gate, named_gate_parameters
from mmgate.listing import looks_like_attention
from mmgate.wrappers import unwrap_model, without_wrappers

TRAINS = ('gates', 'attention', 'all')
# The attribute of a model whose frozen weights have been checked.
CHECKED = 'checked_for_random_weights'


def gate_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that gates add to a model, by name.

    Args:
        model: A gated model. A wrapper (DDP, EMA) adds its prefix to the names.
    """
    return dict(named_gate_parameters(model))


def train_only_gates(model: nn.Module, train: str = 'gates') -> list[str]:
    """Freeze all parameters of a model but those of its gates; call it before the optimizer is built.

    Frozen parameters get no gradient and no state of the optimizer, and modules before the first gate keep no graph.
    In training mode, batch norms keep their running statistics, and layers of dropout outside of gated attention are
    off. Dropout by a function, as in layers of transformers, stays as the model has it.

    When the model is first set to training mode afterwards, a warning names frozen parts that look as if they had never
    been trained.

    Args:
        model: A gated model.
        train: ``'gates'``: the gates' parameters, in a backbone's frozen stages, too, but not in a frozen copy of a
            part of the model, such as a teacher. ``'attention'``: all parameters of the modules that the rules chose.
            ``'all'``: all parameters that were trainable before.

    Returns:
        The names of the parameters that train.

    Raises:
        ConfigError: ``train`` is unknown, or the model has no gates.
    """
    if train not in TRAINS:
        raise ConfigError(f'train={train!r}: it is one of {", ".join(map(repr, TRAINS))}.')
    model = unwrap_model(model)
    gates = gate_parameters(model)
    if not gates:
        raise ConfigError(
            f'train={train!r}: this {type(model).__name__} has no gates; replace attention first '
            "(type='mmgate.Gated', or mmgate.swap_attention)."
        )
    unfreeze(model)
    if train != 'all':
        copies = tuple(f'{name}.' for name in averaged_copies(model))
        woken = [without_wrappers(name) for name, parameter in gates.items() if not parameter.requires_grad]
        for name, parameter in gates.items():
            parameter.requires_grad_(not name.startswith(copies))
        chosen = {id(parameter) for parameter in gates.values()}
        if train == 'attention':
            chosen |= {id(parameter) for module in _gated_attention(model) for parameter in module.parameters()}
        frozen = []
        for name, parameter in model.named_parameters():
            if id(parameter) not in chosen and parameter.requires_grad:
                parameter.requires_grad_(False)
                frozen.append(without_wrappers(name))
        state = dict(frozen_by_gates=frozen, woken_by_gates=woken, trained_with_gates=train)
        vars(model).update(state, train=partial(_set_mode, model))
        _train_gated_parts(model, model.training)
    trained = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
    total = sum(parameter.numel() for parameter in model.parameters())
    log(f'mmgate: trains {sum(trained.values()):,} of {total:,} parameters ({train})')
    return list(trained)


def unfreeze(model: nn.Module) -> None:
    """Let those parameters train again that :func:`train_only_gates` has frozen, and freeze what it let train."""
    parameters = _parameters(model)
    for name in set(vars(model).pop('woken_by_gates', ())) & parameters.keys():
        parameters[name].requires_grad_(False)
    for name in set(vars(model).pop('frozen_by_gates', ())) & parameters.keys():
        parameters[name].requires_grad_(True)
    vars(model).pop(CHECKED, None)
    if vars(model).pop('trained_with_gates', None):
        del vars(model)['train']
        model.train(model.training)


def _parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return a model's parameters by all of their names without wrappers, which may have come since they were noted."""
    return {without_wrappers(name): parameter for name, parameter in model.named_parameters(remove_duplicate=False)}


def _set_mode(model: Any, mode: bool = True) -> nn.Module:
    if mode and CHECKED not in vars(model):
        _warn_of_random_weights(model)
        vars(model)[CHECKED] = True
    return _train_gated_parts(model, mode)


def _warn_of_random_weights(model: nn.Module) -> None:
    """Warn of frozen parts that look untrained: the weights of all their norms are 1, as at the start."""
    starts: dict[str, bool] = {}
    parameters = _parameters(model)
    for name in vars(model).get('frozen_by_gates', ()):
        weight = parameters.get(name)
        # Sharding renames parameters, and may leave none of a weight here.
        if weight is None or weight.is_meta or not weight.numel():
            continue
        if not name.endswith('weight') or weight.dim() != 1:
            continue
        part = name.partition('.')[0]
        starts[part] = starts.get(part, True) and bool((weight == 1).all())
    parts = [part for part, at_start in starts.items() if at_start]
    if parts:
        log(
            'The gates train beside frozen weights that are drawn at random: no norm has moved from its start in '
            f'{", ".join(parts)}. Give the checkpoint of the trained vanilla model: --cfg-options '
            "load_from=vanilla.pth, or in Python load_checkpoint(model, 'vanilla.pth') before the training.",
            logging.WARNING,
        )


def _train_gated_parts(model: Any, mode: bool) -> nn.Module:
    """Set training or eval mode of a model of which only gates train; its other norms and dropout stay in eval mode."""
    trained = [parameter for parameter in gate_parameters(model).values() if parameter.requires_grad]
    type(model).train(model, mode)
    # Backbones freeze their stages, gates included, whenever a mode is set.
    for parameter in trained:
        parameter.requires_grad_(True)
    if mode:
        gates = [module for module in model.modules() if isinstance(module, Gate)]
        gated = {id(part) for module in (*_gated_attention(model), *gates) for part in module.modules()}
        for module in model.modules():
            # Heads and detectors look at their mode to know if they train, so that it stays. Dropout layers and batch
            # norms are leaves; attention may drop weights by a function.
            drops = not any(True for _ in module.children())
            # LeViT's and TinyViT's attention derives weights where it sets its mode.
            drops = drops or (looks_like_attention(module) and type(module).train is nn.Module.train)
            if (drops and id(module) not in gated) or getattr(module, 'running_mean', None) is not None:
                # The attribute, as eval() would reach a gate inside.
                module.training = False
    return model


def _gated_attention(model: nn.Module) -> list[nn.Module]:
    """Return all gated attention modules of a model, those that rules name."""
    return [model.get_submodule(module.gating.chosen_name(name)) for name, module in gated_modules(model)]
