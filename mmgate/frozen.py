"""Gates in frozen parts of a model: they follow an attention that is frozen in training, and a warning names them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from torch import nn

from mmgate._environment import log
from mmgate.adapter import is_quantised
from mmgate.errors import ConfigError, listed
from mmgate.gate import gates_hidden
from mmgate.wrappers import named_parts, unwrap_model

# The number of modules that the warning names.
MOST_NAMES = 12


def frozen_attention(model: nn.Module, planned: Mapping[str, tuple[nn.Module, object]]) -> list[str]:
    """Return the paths of attention that is frozen in training, whose gates are to be frozen, too; warn of them.

    Args:
        model: A model before its gates are put in.
        planned: By path, the attention that is to be gated, and what makes its gate.

    Raises:
        ConfigError: Rules differ for a part of the model and a frozen copy of it, or an average would leave gates out.
    """
    refuse_unlike(model, {id(attention): made_by for attention, made_by in planned.values()})
    frozen = frozen_in_training(model, {path: attention for path, (attention, _) in planned.items()})
    warn_of_frozen(model, frozen)
    return frozen


def frozen_in_training(model: nn.Module, modules: Mapping[str, nn.Module]) -> list[str]:
    """Return the names of modules that are frozen while other parts of the model train; none if nothing trains.

    Backbones freeze their stages whenever ``train()`` is called, so that it is called for a moment.

    Args:
        model: A model.
        modules: Modules in it, by name.
    """
    modes = [(module, module.training) for module in model.modules()]
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        # Not by a method that train_only_gates has set on the model, which warns once.
        type(model).train(model)
        return [name for name, module in modules.items() if _is_frozen(module)] if _trains(model) else []
    finally:
        # Some layers derive weights for evaluation here.
        for module, mode in modes:
            if module.training and not mode:
                module.train(False)
        for module, mode in modes:
            module.training = mode
        for parameter, flag in flags:
            parameter.requires_grad_(flag)


def warn_of_frozen(model: nn.Module, names: Sequence[str]) -> None:
    """Warn of gates that do not train, since the attention around them does not; copies of what trains are averages."""
    copies = tuple(f'{name}.' for name in averaged_copies(model))
    still = [name for name in names if not name.startswith(copies)]
    if still:
        log(
            f"mmgate: with train='all', {len(still)} gates stay as they start, or as a checkpoint fills them, because "
            'the attention around them is frozen in training (frozen_stages, or requires_grad=False): '
            f"{listed(still, MOST_NAMES)}. To train them, freeze less, or give train='gates'.",
            logging.WARNING,
        )


def averaged_copies(model: nn.Module) -> dict[str, str]:
    """Return the frozen parts that are copies of a part that trains, by name, with the name of that part.

    Semi-supervised detectors and momentum encoders average one into the other, tensor by tensor.
    """
    parts = _parts(model)
    tensors = {path: (type(part), [(n, p.shape) for n, p in part.named_parameters()]) for path, part in parts.items()}
    sources = [name for name, part in parts.items() if _trains(part)]
    frozen = [name for name in parts if name not in sources]
    return {copied: source for copied in frozen for source in sources if tensors[source] == tensors[copied]}


def refuse_unlike(model: nn.Module, rules: Mapping[int, object]) -> None:
    """Raise ConfigError if an average of weights would miss gates that come now.

    That is so if rules differ for a part of the model and its frozen copy, which may be the average of that part, or
    if a module to be gated lies in an averaged model that has listed its tensors already.

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


def _is_frozen(module: nn.Module) -> bool:
    """Return True if a module has parameters and none trains; quantised ones, which never do, are left out."""
    parts = [part for part in module.modules() if not is_quantised(part)]
    flags = [parameter.requires_grad for part in parts for parameter in part.parameters(recurse=False)]
    return bool(flags) and not any(flags)


def _trains(part: nn.Module) -> bool:
    """Return True if any parameter trains; gates of earlier rules do not count."""
    with gates_hidden():
        return any(parameter.requires_grad for parameter in part.parameters())


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
