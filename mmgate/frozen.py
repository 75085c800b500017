"""Gates in frozen parts of a model: they follow a host that is frozen as a whole, and a warning names what rests."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn

from mmgate._environment import log
from mmgate.errors import ConfigError, listed
from mmgate.layers.base.gate import Gate, named_gate_parameters
from mmgate.wrappers import named_parts, unwrap_model, without_wrappers

# The number of modules that the warning names for each class of gates.
MOST_NAMES = 12


def frozen_parts(model: nn.Module) -> list[str]:
    """Return the names of children that are frozen as a whole, such as a teacher; none if nothing in the model trains.

    Layers of a list or a sequence do not count as parts.
    """
    # Gates that an earlier rule has put in do not count: a frozen model's gates train, rule after rule.
    gates = {id(parameter) for _, parameter in named_gate_parameters(model)}

    def trains(part: nn.Module) -> bool:
        return any(parameter.requires_grad for parameter in part.parameters() if id(parameter) not in gates)

    return [name for name, part in _parts(model).items() if not trains(part)] if trains(model) else []


def averaged_copies(model: nn.Module) -> dict[str, str]:
    """Return the frozen parts that are copies of a part that trains, by name, with the name of that part.

    Semi-supervised detectors and momentum encoders average one into the other, tensor by tensor.
    """
    parts = _parts(model)
    frozen = frozen_parts(model)
    tensors = {path: (type(part), [(n, p.shape) for n, p in part.named_parameters()]) for path, part in parts.items()}
    return {
        copied: source
        for copied in frozen
        for source in parts
        if source not in frozen and tensors[source] == tensors[copied]
    }


def refuse_unlike(model: nn.Module, rules: Mapping[int, Sequence[object]]) -> None:
    """Raise ConfigError if rules gate a part of a model and a frozen copy of it differently, or what an average lists.

    Args:
        model: The model before its gates are put in.
        rules: For each module to be gated, by its id, what makes its gate.
    """
    for name, module in model.named_modules():
        # mmengine's averages list their tensors once.
        if 'avg_parameters' in vars(module) and any(id(part) in rules for part in module.modules()):
            raise ConfigError(
                f'{name or "the model"} is an average ({type(module).__name__}) that would leave out gates that come '
                "later. Gate its source before: by backbone=dict(type='mmgate.Gated', host=..., attention=...), or by "
                'mmgate.swap_attention before the average is made.'
            )
    parts = _parts(model)
    for copied, source in averaged_copies(model).items():
        others = dict(named_parts(parts[source]))
        for name, module in named_parts(parts[copied]):
            if rules.get(id(module)) != rules.get(id(others.get(name))):
                raise ConfigError(
                    f'{copied} is a frozen copy of {source}, so that its tensors may be averages of those, and the '
                    f"rules gate {name} in one of the two or differently. Gate both alike: in mmdet's semi-supervised "
                    "detectors by detector=dict(type='mmgate.Gated', host=..., attention=...), else by a path that "
                    f'matches both. Where nothing is averaged, call mmgate.swap_attention(model.{source}, ...).'
                )


def warn_at_start(model: nn.Module) -> None:
    """Let the first call of ``model.train()`` warn of gates that do not train; backbones freeze their stages there."""
    vars(model).setdefault('train', partial(_first_mode, model))


def forget_start(model: nn.Module) -> None:
    """Undo :func:`warn_at_start`."""
    if getattr(vars(model).get('train'), 'func', None) is _first_mode:
        del vars(model)['train']


def _first_mode(model: Any, mode: bool = True) -> nn.Module:
    """Set a mode as the model's class does; the first training mode warns of gates that rest in frozen parts."""
    if not mode:
        type(model).train(model, mode)
        return model
    forget_start(model)
    before = {name for name, parameter in named_gate_parameters(model) if parameter.requires_grad}
    type(model).train(model, mode)
    after = {name for name, parameter in named_gate_parameters(model) if parameter.requires_grad}
    # A model that was frozen as a whole, such as a teacher, does not train by intention.
    if before - after or any(parameter.requires_grad for parameter in model.parameters()):
        _warn_of_frozen_gates(model)
    return model


def _warn_of_frozen_gates(model: nn.Module) -> None:
    """Warn of gates that are frozen at the start of a training, and that no checkpoint has filled."""
    copies = tuple(f'{name}.' for name in averaged_copies(model))
    resting: dict[type[Gate], list[str]] = {}
    tensors = 0
    for name, module in model.named_modules():
        if not isinstance(module, Gate) or module.loaded or without_wrappers(name).startswith(copies):
            continue
        parameters = list(module.parameters())
        if parameters and not any(parameter.requires_grad for parameter in parameters):
            resting.setdefault(type(module), []).append(name.rpartition('.')[0])
            tensors += len(parameters)
    if not resting:
        return
    told = []
    for kind, names in resting.items():
        start = 'which starts as the vanilla attention' if kind.identity_start else 'whose weights are drawn at random'
        told.append(f'{kind.__name__}, {start}, in {listed(names, MOST_NAMES)}')
    total = sum(1 for _ in named_gate_parameters(model))
    log(
        f'{tensors} of {total} tensors of gates stay as they start, because the parts around them are frozen '
        f'(frozen_stages, or requires_grad=False): {"; ".join(told)}. Freeze less, leave these modules out of the '
        "rule's path, load a checkpoint that fills them, or train gates beside frozen weights: train='gates'.",
        logging.WARNING,
    )


def _parts(model: nn.Module) -> dict[str, nn.Module]:
    """Return the children of a model that have parameters, without wrappers such as averages, by name."""
    if isinstance(model, (nn.ModuleList, nn.Sequential)):
        return {}
    parts = {}
    for name, child in model.named_children():
        inner = unwrap_model(child)
        if any(True for _ in inner.parameters()):
            parts[name] = inner
    return parts
