"""Save the gates of a model into a gates file, and put the gates of a file into a vanilla model."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mmgate.adapter import gated_modules
from mmgate.checkpoints.gates_file import GatesFile, checksum, read_gates, write_gates
from mmgate.errors import ConfigError, listed
from mmgate.gate import Gate
from mmgate.gates.base.map import IMAGE_SIDE
from mmgate.hosts.from_model import needs_image_size
from mmgate.hosts.table import adapter_for
from mmgate.registry import MODELS
from mmgate.rules import gate_named
from mmgate.start import wrap_init_weights
from mmgate.swap import swap_attention
from mmgate.wrappers import (
    named_parts,
    refuse_replicated,
    refuse_sharded,
    unwrap_model,
    vanilla_name,
    vanilla_names,
    vanilla_state,
    without_wrappers,
)

from .removal import release_trained, restore_attention

TypeAndOptions = dict[str, Any]  # of a gate, as a rule has them
# Options of the images in pre-training, which a rule or the model tells. Position terms are resized to them on loading.
OF_IMAGES = ('image_size', 'map_size')
STATISTICS = ('running_mean', 'running_var', 'num_batches_tracked')  # of a norm that trains


def save_gates(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Save a model's gates, and what was trained together with them, into a safetensors file.

    The file has the place of each gate in the model as it is now, its type and its options, and checksums of some of
    the vanilla model's tensors. Other parameters are in it if they train now, after :func:`train_only_gates`, or came
    with a gates file. Adapters of PEFT are left out: the file fits the model with and without them.

    Raises:
        ConfigError: The model has no gates or is sharded, the file cannot be written, a gate has an option that JSON
            cannot hold, its type is a class without a registered name, or tensors of a gates file that was loaded are
            gone.
    """
    write_gates(path, gates_content(model))


def gates_content(model: nn.Module) -> GatesFile:
    """Return the content of the gates file that :func:`save_gates` would write, with the same errors."""
    refuse_sharded(model, 'has no whole gates to be saved; extract them from its checkpoints.')
    model = unwrap_model(model)
    state = vanilla_state(model)
    gate_prefixes = tuple(
        f'{vanilla_name(model, name)}.'
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, Gate)
    )
    gates = {name: tensor for name, tensor in state.items() if name.startswith(gate_prefixes)}
    if not gates:
        raise ConfigError(f'this {type(model).__name__} has no gates to be saved.')
    if any(tensor.is_meta for tensor in gates.values()):
        raise ConfigError(
            f'the gates of this {type(model).__name__} have no values here (device meta): accelerate has offloaded '
            'them, or the model was never filled. Save the gates before accelerate.cpu_offload or after its hooks are '
            'removed.'
        )
    modes = [vars(module).get('trained_with_gates') for module in model.modules()]
    trained = next((mode for mode in modes if mode), 'all')
    of_host = {name: tensor for name, tensor in state.items() if name not in gates}
    with_them = {name: tensor for name, tensor in of_host.items() if trained != 'all' and tensor.requires_grad}
    places = _places(model)
    if trained == 'attention' and not with_them:  # a frozen copy, such as mmengine's average of a model
        inside = tuple(f'{place}.' for place in places)
        with_them = {name: x for name, x in of_host.items() if isinstance(x, nn.Parameter) and name.startswith(inside)}
    modules = {name.rpartition('.')[0] for name in with_them}
    with_them |= {
        name: tensor
        for name, tensor in of_host.items()
        if name.rpartition('.')[0] in modules and name.rpartition('.')[2] in STATISTICS
    }
    of_file = _names_of_file(model)
    if trained != 'attention' and (gone := [name for name in of_file if name not in of_host]):
        raise ConfigError(
            f'{listed(gone)} came with a gates file, and this {type(model).__name__} has them no more. If layers were '
            "cut, call mmgate.train_only_gates(model, 'attention') first: then all gated attention is saved."
        )
    with_them |= {name: of_host[name] for name in of_file if name in of_host}
    untrained = [
        name
        for name, tensor in of_host.items()
        if isinstance(tensor, nn.Parameter) and not tensor.is_meta and name not in with_them
    ]
    return GatesFile(
        tensors={**gates, **with_them},
        gates=list(gates),
        trained=trained,
        places=places,
        # Some tensors suffice, from the head down: backbones often are the same.
        values={name: checksum(of_host[name]) for name in untrained[:: -max(1, len(untrained) // 8)]},
    )


def load_gates(model: nn.Module, path: str | os.PathLike[str]) -> list[str]:
    """Put the gates of a gates file into a model, and return the names of the tensors that were loaded.

    Each gate gets its place, type and options from the file. Other tensors that were trained with the gates stay as
    the file has them when the model is initialised, or when a checkpoint without gates is loaded afterwards. Those that
    lie outside of gated attention and do not fit, such as a head for other classes, are left out with a warning.
    A warning is also logged if the vanilla tensors of the model, or those of a checkpoint that is loaded afterwards,
    have other values than those that the gates were trained beside.

    Args:
        model: A vanilla model, or one that has gates of the file in their places.
        path: A gates file.

    Raises:
        ConfigError: The file is no gates file or is damaged, the model lacks attention for which it has gates, or has
            attention of other sizes or other gates in it. A model without gates is then as it was.
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
    content = content.fitted(path, vanilla_state(model))
    there = _places(model)
    wanted = _places_by_patterns(path, model, content, there) if content.patterns else content.places
    other = [
        f'{one} has {rule} instead of {wanted.get(one)}'
        for one, rule in there.items()
        if not _alike(rule, wanted.get(one))
    ]
    if other:
        raise ConfigError(
            f'{path} holds other gates than this model has: {listed(other, separator="; ")}. Leave `attention` away, '
            'then they come from the file; a backbone that brings gates has to be built as it was.'
        )
    grouped: dict[str, TypeAndOptions] = {}
    for place, rule in wanted.items():
        if place not in there:
            grouped.setdefault(json.dumps(rule), {**rule, 'path': []})['path'].append(place)
    missing = [*grouped.values()]
    if missing:
        refuse_replicated(wrapped)
    release_trained(model)
    try:
        if missing:
            swap_attention(model, missing)
        _fill(model, content.tensors)
    except Exception as error:
        if not there:
            restore_attention(model)
        # Other errors are faults in the code of a gate.
        if isinstance(error, (RuntimeError, ValueError)):
            raise ConfigError(f'the gates of {path} do not fit: {error}') from error
        raise
    hook = model._register_load_state_dict_pre_hook(partial(_meet_checkpoint, path, content), with_module=True)
    vars(model).update(gates_file=os.fspath(path), gates_file_hook=hook)
    if content.host_tensors:
        vars(model)['gates_file_tensors'] = [*content.host_tensors]
        wrap_init_weights(model)
        vars(model)['after_init_weights'] = partial(_fill, model, content.host_tensors)
    return content


def _names_of_file(model: nn.Module) -> list[str]:
    """Return the vanilla names of what a gates file has filled beside the gates, in a model or in a part of it."""
    parts = [(name, vars(part).get('gates_file_tensors', ())) for name, part in model.named_modules()]
    return [f'{vanilla_name(model, part)}.{name}' if part else name for part, names in parts for name in names]


def _places(model: nn.Module) -> dict[str, TypeAndOptions]:
    """Return type and options of each gate by the path, in the model as it is now, of the module that a rule chose."""
    places = {}
    for name, module in gated_modules(model):
        record = module.gating
        path = record.chosen_name(without_wrappers(name))
        described = _described(record.rule)
        map_size = getattr(module.gates()[0], 'map_size', None)
        # The map in pre-training, which another model may not tell.
        if map_size is not None:
            described.pop('image_size', None)
            described['map_size'] = list(map_size)
        places[path] = described
    return places


def _described(rule: Mapping[str, Any]) -> TypeAndOptions:
    """Return type and options of a rule in the form that a gates file has, so that equivalent ones compare as equal."""
    # The backend belongs to the machine, not to the gate. class_token, which mmgate 0.2.0 had, is told by the model.
    options = {name: value for name, value in rule.items() if name not in ('path', 'type', 'backend', 'class_token')}
    # So mmgate 0.2.0 had it.
    if 'map_size' in options and options['map_size'] is None:
        options.update(position_encoding=False)
        del options['map_size']
    try:
        return json.loads(json.dumps(dict(type=_named(rule['type']), **options)))
    except (TypeError, ValueError) as error:
        raise ConfigError(f'a file of gates cannot hold the rule {rule}: {str(error).rstrip(".")}.') from error


def _alike(rule: TypeAndOptions, other: TypeAndOptions | None) -> bool:
    """Return True if two rules put in the same gates; the images in pre-training may differ."""
    known, found = ({k: v for k, v in (one or {}).items() if k not in OF_IMAGES} for one in (rule, other))
    return known == found


def _named(gate_type: str | type[nn.Module]) -> str:
    found = MODELS.get(gate_type) if isinstance(gate_type, str) else gate_type
    ours = next((name for name, registered in MODELS.module_dict.items() if registered is found), None)
    if ours is not None:
        return f'mmgate.{ours}'
    if isinstance(gate_type, str):
        return gate_type
    if getattr(MODELS, 'root', MODELS).get(gate_type.__name__) is gate_type:
        return gate_type.__name__
    raise ConfigError(
        f'{gate_type.__name__} has no registered name; register it (MODELS.register_module) to name it in files.'
    )


def _places_by_patterns(
    path: Any, model: nn.Module, content: GatesFile, there: Mapping[str, TypeAndOptions]
) -> dict[str, TypeAndOptions]:
    """Return the places of a file of version 1, with type and options of each gate.

    The gates' tensors tell the gated modules. A pattern matches such a module or the wrapper around it. Maps that the
    model does not tell were taken as those of images of 224 pixels.
    """
    parts = {without_wrappers(name): module for name, module in named_parts(model) if name}
    rules = [
        (_pattern_of_version_1(prefix, rule['path']), _described(rule))
        for prefix, rules in content.patterns.items()
        for rule in rules
    ]
    places: dict[str, TypeAndOptions] = {}
    for gated in content.attention:
        for place in (gated.rpartition('.')[0], gated):
            fitting = [rule for pattern, rule in rules if place in parts and pattern.fullmatch(place)]
            if place in there:
                fitting.sort(key=lambda rule: not _alike(rule, there[place]))
            else:
                found = [adapter_for(gate_named(rule['type'], str(path)), parts[place]) for rule in fitting]
                inner = [without_wrappers(f'{place}.{one[1]}'.rstrip('.')) if one else None for one in found]
                fitting = [rule for rule, one in zip(fitting, inner, strict=True) if one == gated]
            if fitting:
                places[place] = fitting[0]
                break
    # A gate without parameters has no tensors, so that its rule alone tells its modules.
    for pattern, rule in [one for one in rules if one[1] not in places.values()]:
        gate = gate_named(rule['type'], str(path))
        for name in filter(pattern.fullmatch, parts):
            if _alike(there[name], rule) if name in there else adapter_for(gate, parts[name]):
                places[name] = rule
    lost = [rule for _, rule in rules if rule not in places.values()]
    if lost:
        raise ConfigError(
            f'{path} is of mmgate 0.2.0, and a rule in it finds no attention in this model: {lost[0]}. Give the config '
            'that its gates were trained with.'
        )
    for place, rule in places.items():
        options = {name: value for name, value in rule.items() if name != 'type'}
        gate = gate_named(rule['type'], str(path))
        if place not in there and needs_image_size(model, place, gate, options):
            places[place] = {**rule, 'image_size': IMAGE_SIDE}
    return places


def _pattern_of_version_1(prefix: str, paths: list[str]) -> re.Pattern[str]:
    """Return the regular expression of a rule's paths in mmgate 0.2.0, where ``**`` was any text."""
    known = {'**': '.*', '*': '[^.]*'}
    split = [re.split(r'(\*\*|\*)', f'{prefix}.{path}'.lstrip('.')) for path in paths]
    return re.compile('|'.join(''.join(known.get(part, re.escape(part)) for part in parts) for parts in split))


@torch.no_grad()
def _fill(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    present = {vanilla: name for name, vanilla in vanilla_names(model).items()}
    named = {present.get(name, name): tensor for name, tensor in tensors.items()}
    # What the file lacks of a host, another checkpoint may have filled.
    lacks = [(module.gating, module.gating.lacks) for _, module in gated_modules(model)]
    unknown = model.load_state_dict(named, strict=False).unexpected_keys
    for record, before in lacks:
        record.lacks = before
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
