"""Save the gates of a model into a gates file, and put the gates of a file into a vanilla model."""

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
from mmgate.checkpoints.gates_file import GatesFile, checksum, read_gates, write_gates
from mmgate.errors import ConfigError
from mmgate.layers.base.gated import gated_modules
from mmgate.registry import MODELS
from mmgate.starts import initialise_gates_last
from mmgate.swap import swap_attention
from mmgate.wrappers import (
    refuse_replicated,
    refuse_sharded,
    unwrap_model,
    vanilla_name,
    vanilla_names,
    vanilla_state,
    without_wrappers,
)

from .removal import forget_trained, gates_disabled, restore
from .training import gate_parameters

Rule = dict[str, Any]


def save_gates(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Save a model's gates, and the parameters that were trained together with them, into a safetensors file.

    The file also holds the rules that placed the gates, the names and shapes of the vanilla model's tensors, and
    checksums of some of them. Adapters of PEFT are left out: the file fits the model with and without them.

    It switches the gates off for a moment, as :func:`gates_disabled` does, which says what this means for threads.

    Raises:
        ConfigError: The model has no gates or is sharded, the file cannot be written, a rule has an option that JSON
            cannot hold, or a rule's type is a class without a registered name.
    """
    write_gates(path, gates_content(model))


def gates_content(model: nn.Module) -> GatesFile:
    """Return the content of the gates file that :func:`save_gates` would write, with the same errors."""
    refuse_sharded(model, 'has no whole gates to be saved; extract them from its checkpoints.')
    model = unwrap_model(model)
    rules = _rules(model)
    with gates_disabled(model):
        vanilla = vanilla_state(model)
    state = vanilla_state(model)
    shared = {id(tensor) for tensor in vanilla.values()}
    # PEFT's layer around torch's attention makes new parameters of the host's whenever it is read.
    gates = [name for name, tensor in state.items() if id(tensor) not in shared and name not in vanilla]
    gates += [name for name in _gate_names(model) if name not in gates]
    if not gates:
        raise ConfigError(f'this {type(model).__name__} has no gates to be saved.')
    if any(state[name].is_meta for name in gates):
        raise ConfigError(
            f'the gates of this {type(model).__name__} have no values here (device meta): accelerate has offloaded '
            'them, or the model was never filled. Save the gates before accelerate.cpu_offload or after its hooks are '
            'removed.'
        )
    trained = [vars(module).get('trained_with_gates') for module in model.modules()]
    train = next((mode for mode in trained if mode), 'all')
    # Parts that gated modules leave out are not in this state dict: they do not train.
    trains = {id(tensor) for tensor in state.values() if train != 'all' and tensor.requires_grad}
    also = {name: t for name, t in vanilla.items() if id(t) in trains and name not in gates}
    beside = {name: t for name, t in vanilla.items() if name not in gates}
    kept = [
        name
        for name, tensor in beside.items()
        if isinstance(tensor, nn.Parameter) and not tensor.is_meta and name not in also and state.get(name) is tensor
    ]
    return GatesFile(
        tensors={**{name: state[name] for name in gates}, **also},
        gates=gates,
        host=type(model).__name__,
        rules=rules,
        shapes={name: list(tensor.shape) for name, tensor in beside.items()},
        trained=train,
        # Some tensors suffice, from the head down: backbones often are the same.
        values={name: checksum(vanilla[name]) for name in kept[:: -max(1, len(kept) // 8)]},
    )


def load_gates(model: nn.Module, path: str | os.PathLike[str]) -> list[str]:
    """Put the gates of a gates file into a model, and return the names of the tensors that were loaded.

    Other tensors that were trained with the gates stay as the file has them when the model is initialised, or when a
    checkpoint without gates is loaded afterwards. A warning is logged if the vanilla tensors of the model, or those of
    a checkpoint that is loaded afterwards, have other values than those that the gates were trained beside.

    Args:
        model: A vanilla model, or one with the same gates.
        path: A gates file.

    Raises:
        ConfigError: The file is no gates file or is damaged, its gates belong to a model of other tensors, or they are
            placed by other rules than the model's. A model without gates is then as it was.
    """
    content = put_gates(model, path)
    content.warn_of_other_values(path, vanilla_state(unwrap_model(model)))
    return list(content.tensors)


def put_gates(model: nn.Module, path: str | os.PathLike[str]) -> GatesFile:
    """Put the gates of a file into a model that is not yet initialised, so that values cannot be compared yet.

    All else is as in :func:`load_gates`.
    """
    content = read_gates(path)
    refuse_sharded(model, 'takes no gates; load them first, then shard the model.')
    wrapped = model
    model = unwrap_model(model)
    with gates_disabled(model):
        own = _gate_names(model)
        shapes = {name: list(t.shape) for name, t in vanilla_state(model).items() if name not in own}
    content.refuse_other(os.fspath(path), type(model).__name__, shapes)
    there = _rules(model)
    wanted = {prefix: list(map(_described, rules)) for prefix, rules in content.rules.items()}
    for prefix, placed in there.items():
        if placed != wanted.get(prefix):
            raise ConfigError(
                f'{path} holds gates that {wanted.get(prefix) or "no rules"} placed in {prefix or "the model"}; here '
                f'it is {placed}. Leave `attention` away, then the rules come from the file; a backbone that brings '
                'its own gates has to be built as it was.'
            )
    if content.host != type(model).__name__:
        log(f'{path} holds gates of a {content.host}, this is a {type(model).__name__}', logging.WARNING)
    forget_trained(model)
    added = {prefix: model.get_submodule(prefix) for prefix in wanted if prefix not in there}
    if added:
        refuse_replicated(wrapped)
    try:
        for prefix, module in added.items():
            # One by one: gates of an earlier call of swap_attention may have been there when a later one was made.
            for rule in wanted[prefix]:
                swap_attention(module, rule)
        _fill(model, content.tensors)
    except Exception as error:
        restore(added)
        # Other errors are faults in the code of a gate.
        if isinstance(error, (RuntimeError, ValueError)):
            raise ConfigError(f'the gates of {path} do not fit: {error}') from error
        raise
    hook = model._register_load_state_dict_pre_hook(partial(_meet_checkpoint, path, content), with_module=True)
    vars(model).update(gates_file=os.fspath(path), gates_file_hook=hook)
    if content.host_tensors:
        initialise_gates_last(model)
        vars(model)['after_init_weights'] = partial(_fill, model, content.host_tensors)
    return content


def _rules(model: nn.Module) -> dict[str, list[Rule]]:
    """Return the rules by which a model, and models inside it such as its backbone, were gated, by model name."""
    found: dict[str, dict[int, Rule]] = {}
    for name, module in gated_modules(model):
        record = module.gating
        gated = without_wrappers(record.name)
        here = without_wrappers(name)
        if here == gated or here.endswith(f'.{gated}'):
            prefix = here[: len(here) - len(gated)].rstrip('.')
            found.setdefault(prefix, {})[record.number] = _described(record.rule)
    return {prefix: [rule for _, rule in sorted(rules.items())] for prefix, rules in found.items()}


def _described(rule: Mapping[str, Any]) -> Rule:
    """Return a rule in the form that a gates file has, so that equivalent rules compare as equal."""
    path = rule['path']
    plain = dict(rule, type=_named(rule['type']), path=[path] if isinstance(path, str) else list(path))
    # The backend belongs to the machine, not to the gates.
    plain.pop('backend', None)
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


def _gate_names(model: nn.Module) -> set[str]:
    """Return the names of the gates' parameters in the form that gates files have."""
    names = {vanilla_name(model, name) for name in gate_parameters(model)}
    return {name for name in names if name is not None}


@torch.no_grad()
def _fill(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    present = {vanilla: name for name, vanilla in vanilla_names(model).items()}
    named = {present.get(name, name): tensor for name, tensor in tensors.items()}
    unknown = model.load_state_dict(named, strict=False).unexpected_keys
    if unknown:
        raise ConfigError(f'the model has no {", ".join(unknown[:3])}')


def _meet_checkpoint(
    path: Any, content: GatesFile, model: nn.Module, state: dict[str, Any], prefix: str, *_: Any
) -> None:
    """Keep tensors that were trained with the gates when a vanilla checkpoint is loaded; a load_state_dict hook.

    A checkpoint with gates fills all tensors.
    """
    inside = [key.removeprefix(prefix) for key in state if key.startswith(prefix)]
    here = {vanilla: f'{prefix}{name}' for name in inside if (vanilla := vanilla_name(model, name)) is not None}
    if not here.keys().isdisjoint(content.gates):
        return
    content.warn_of_other_values(path, {name: state[key] for name, key in here.items()})
    state.update({here[name]: tensor for name, tensor in content.host_tensors.items() if name in here})
