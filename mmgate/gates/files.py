"""Gates in files of their own, and put on the vanilla model of someone else."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mmgate._environment import log
from mmgate.checkpoints.gates_file import GatesFile, read_gates, write_gates
from mmgate.errors import ConfigError
from mmgate.registry import MODELS
from mmgate.swap import swap_attention

from .parts import gate_parameters, innermost, swaps_by_path
from .removal import forget_trained, gates_disabled, restore

Rule = dict[str, Any]


def save_gates(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write the gates of a model, and what :func:`train_only_gates` trained with them, into a safetensors file.

    Beside the tensors it holds the rules that placed the gates and the names and shapes of the vanilla model's tensors.

    Raises:
        ConfigError: The file cannot be written, a rule has an option that JSON cannot hold, or a rule's type is a class
            without a registered name.
        ValueError: The model has no gates.
    """
    write_gates(path, gates_content(model))


def gates_content(model: nn.Module) -> GatesFile:
    """Return what :func:`save_gates` writes.

    Raises:
        ConfigError: A rule has an option that JSON cannot hold, or its type is a class without a registered name.
        ValueError: The model has no gates.
    """
    model = innermost(model)
    rules = _rules(model)
    with gates_disabled(model):
        vanilla = model.state_dict(keep_vars=True)
    state = model.state_dict(keep_vars=True)
    shared = {id(tensor) for tensor in vanilla.values()}
    gates = [name for name, tensor in state.items() if id(tensor) not in shared]
    gates += [name for name in gate_parameters(model) if name not in gates]
    if not gates:
        raise ConfigError(f'this {type(model).__name__} has no gates to be saved.')
    trained = [vars(module).get('trained_with_gates') for module in model.modules()]
    train = next((mode for mode in trained if mode), 'all')
    also = {name: t for name, t in vanilla.items() if train != 'all' and t.requires_grad and name not in gates}
    return GatesFile(
        tensors={**{name: state[name] for name in gates}, **also},
        gates=gates,
        host=type(model).__name__,
        rules=rules,
        shapes={name: list(tensor.shape) for name, tensor in vanilla.items() if name not in gates},
        trained=train,
    )


def load_gates(model: nn.Module, path: str | os.PathLike[str]) -> list[str]:
    """Put the gates of a file into a model, vanilla or with the same gates, and return the names of what was loaded.

    What was trained beside the gates stays as the file has it when a checkpoint without gates is loaded afterwards.

    Raises:
        ConfigError: The file is none of gates, damaged, or its gates belong to a model of other tensors or are placed
            by other rules than the model's. A model without gates is then as it was.
    """
    content = read_gates(path)
    model = innermost(model)
    with gates_disabled(model):
        own = set(gate_parameters(model))
        shapes = {name: list(t.shape) for name, t in model.state_dict().items() if name not in own}
    content.refuse_other(os.fspath(path), type(model).__name__, shapes)
    there, wanted = _rules(model), {prefix: list(map(_described, rules)) for prefix, rules in content.rules.items()}
    for prefix in there:
        if there[prefix] != wanted.get(prefix):
            raise _other_rules(path, prefix, wanted.get(prefix), there[prefix])
    if content.host != type(model).__name__:
        log(f'{path} holds gates of a {content.host}, this is a {type(model).__name__}', logging.WARNING)
    forget_trained(model)
    added = {prefix: model.get_submodule(prefix) for prefix in wanted if prefix not in there}
    try:
        for prefix, module in added.items():
            for rule in wanted[prefix]:  # one by one: a later call of swap_attention may have met gates of an earlier
                swap_attention(module, rule)
        _fill(model, content)
    except (RuntimeError, TypeError, ValueError) as error:
        restore(added)
        raise ConfigError(f'the gates of {path} do not fit: {error}') from error
    vars(model)['gates_file'] = os.fspath(path)  # for what is said of a vanilla checkpoint that is loaded
    also = {name: tensor for name, tensor in content.tensors.items() if name not in content.gates}
    if also:
        hook = partial(_keep_trained, also, content.gates)
        vars(model)['trained_from_file'] = model._register_load_state_dict_pre_hook(hook)
    return list(content.tensors)


def _rules(model: nn.Module) -> dict[str, list[Rule]]:
    found = {prefix: vars(module).get('attention_rules') for prefix, module in model.named_modules()}
    return {prefix: list(map(_described, rules)) for prefix, rules in found.items() if rules}


def _described(rule: Mapping[str, Any]) -> Rule:
    """Return a rule as a file of gates has it, so that rules that say the same are equal."""
    path = rule['path']
    plain = dict(rule, type=_named(rule['type']), path=[path] if isinstance(path, str) else list(path))
    try:
        return json.loads(json.dumps(plain))
    except (TypeError, ValueError) as error:
        raise ConfigError(f'a file of gates cannot hold the rule {rule}: {error}.') from error


def _named(kind: str | type[nn.Module]) -> str:
    found = MODELS.get(kind) if isinstance(kind, str) else kind
    ours = next((name for name, registered in MODELS.module_dict.items() if registered is found), None)
    if ours is not None:
        return f'mmgate.{ours}'
    if isinstance(kind, str):
        return kind
    if getattr(MODELS, 'root', MODELS).get(kind.__name__) is kind:
        return kind.__name__
    raise ConfigError(
        f'{kind.__name__} has no registered name; register it (MODELS.register_module) to name it in files.'
    )


@torch.no_grad()
def _fill(model: nn.Module, content: GatesFile) -> None:
    left, unknown = dict(content.tensors), []
    for path, swap in swaps_by_path(model).items():
        inside = {name.removeprefix(f'{path}.'): left.pop(name) for name in list(left) if name.startswith(f'{path}.')}
        unknown += [f'{path}.{name}' for name in swap.gate.load_state_dict(inside, strict=False).unexpected_keys]
    if left:  # trained beside the gates, or gates of a backbone that has them without a host's
        unknown += model.load_state_dict(left, strict=False).unexpected_keys
    if unknown:
        raise ConfigError(f'the model has no {", ".join(unknown[:3])}')


def _keep_trained(also: dict[str, Tensor], gates: list[str], state: dict[str, Any], prefix: str, *_: Any) -> None:
    if not any(f'{prefix}{name}' in state for name in gates):  # else it is a checkpoint of the gated model
        for name, tensor in also.items():
            if f'{prefix}{name}' in state:
                state[f'{prefix}{name}'] = tensor


def _other_rules(path: Any, prefix: str, rules: Any, there: Any) -> ConfigError:
    return ConfigError(
        f'{path} holds gates that {rules or "no rules"} placed in {prefix or "the model"}; here it is {there}. '
        'Leave `attention` away, then the rules come from the file; a backbone that brings its own gates has to be '
        'built as it was.'
    )
