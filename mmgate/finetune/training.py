"""Gates trained alone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn

from mmgate._environment import log
from mmgate.errors import ConfigError
from mmgate.layers.base.gate import Gate
from mmgate.layers.base.gate import gate_parameters as named_gate_parameters
from mmgate.layers.base.gated import GatedModule, gated_modules
from mmgate.wrappers import unwrap_model

TRAINS = ('gates', 'attention', 'all')


def gate_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return by name the parameters that gates add to their hosts.

    Args:
        model: With gates, by whatever way they came in; a wrapper around it (DDP, EMA) adds its prefix to the names.
    """
    return dict(named_gate_parameters(model))


def train_only_gates(model: nn.Module, train: str = 'gates') -> list[str]:
    """Freeze what is not to be trained, for an optimizer that is built afterwards.

    Frozen parameters get no gradient and no state of the optimizer, and what lies before the first gate keeps no graph.
    Batch norms of the host keep their running statistics and, outside of gated attention, dropout is off, whatever the
    mode.

    Args:
        model: With gates.
        train: ``'gates'``: their own parameters, in a backbone's frozen stages, too; ``'attention'``: all of the
            gated modules; ``'all'``: everything that was trainable before.

    Returns:
        The names of the parameters that train.

    Raises:
        ValueError: ``train`` is unknown, or the model has no gates.
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
        chosen = {id(parameter) for parameter in gates.values()}
        if train == 'attention':
            chosen |= {id(parameter) for _, module in gated_modules(model) for parameter in module.parameters()}
        frozen = [name for name, p in model.named_parameters() if id(p) not in chosen and p.requires_grad]
        for name in frozen:
            model.get_parameter(name).requires_grad_(False)
        vars(model).update(frozen_by_gates=frozen, trained_with_gates=train, train=partial(_set_mode, model))
        model.train(model.training)
    trained = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
    total = sum(parameter.numel() for parameter in model.parameters())
    log(f'mmgate: trains {sum(trained.values()):,} of {total:,} parameters ({train})')
    return list(trained)


def frozen_parts_without_weights(model: nn.Module) -> list[str]:
    """Return the parts of a model that :func:`train_only_gates` froze and that no ``init_cfg`` fills from a checkpoint.

    Args:
        model: Before its ``init_weights``; a wrapper around it is looked through.

    Returns:
        Names of children of the model, such as ``'backbone'``; none if everything trains.
    """
    model = unwrap_model(model)
    filled = tuple(f'{name}.' if name else '' for name, module in model.named_modules() if _is_pretrained(module))
    frozen = [
        f'{prefix}.{name}'.lstrip('.')
        for prefix, module in model.named_modules()
        for name in vars(module).get('frozen_by_gates', ())
    ]
    return list(dict.fromkeys(name.partition('.')[0] for name in frozen if not name.startswith(filled)))


def _is_pretrained(module: nn.Module) -> bool:
    given = getattr(module, 'init_cfg', None)
    listed = given if isinstance(given, (list, tuple)) else [given]
    kinds = [one.get('type') for one in listed if isinstance(one, Mapping)]
    return any(str(getattr(kind, '__name__', kind)).endswith(('Pretrained', 'PretrainedInit')) for kind in kinds)


def unfreeze(model: nn.Module) -> None:
    """Let everything train that did before :func:`train_only_gates`."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name in set(vars(model).pop('frozen_by_gates', ())) & parameters.keys():
        parameters[name].requires_grad_(True)
    if vars(model).pop('trained_with_gates', None):
        del vars(model)['train']
        model.train(model.training)


def _set_mode(model: Any, mode: bool = True) -> nn.Module:
    type(model).train(model, mode)
    for parameter in gate_parameters(model).values():  # backbones freeze stages, gates included, with every mode
        parameter.requires_grad_(True)
    if mode:
        gates = [module for module in model.modules() if isinstance(module, (Gate, GatedModule))]
        gated = {id(part) for gate in gates for part in gate.modules()}
        for module in model.modules():
            # heads and detectors ask for the mode to know whether they train; what drops and what counts are leaves,
            # and attention that drops by a function
            drops = not any(True for _ in module.children())
            drops = drops or re.search(r'Attention$|Attn$|MSA$', type(module).__name__) is not None
            if (drops and id(module) not in gated) or getattr(module, 'running_mean', None) is not None:
                module.training = False  # its own, not that of a gate inside
    return model
