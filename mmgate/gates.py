"""Gates as adapters: trained alone, kept in a file of their own, left out, and put on another's vanilla model."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mmgate._environment import log
from mmgate.checkpoints.gates_file import GatesFile, read_gates, write_gates
from mmgate.errors import ConfigError
from mmgate.layers.base.init import GateInit
from mmgate.layers.base.init import gate_parameters as declared_parameters
from mmgate.registry import MODELS
from mmgate.swap import Rules, parse_rules, swap_attention
from mmgate.weight_init import Swap, standing_swaps

TRAINS = ('gates', 'attention', 'all')
SWAPPED = ('attention_swaps', 'attention_rules', 'gates_file', 'init_weights', 'apply')  # what a swap leaves on a model


@MODELS.register_module()
def Gated(
    *,
    host: str,
    attention: Rules | None = None,
    gates: str | None = None,
    train: str = 'all',
    **host_cfg: Any,
) -> nn.Module:
    """Build the model ``host`` with some of its attention modules replaced.

    In a config that inherits an mm config, ``type='mmgate.Gated'``, ``host`` and ``attention`` are all that is added.

    Args:
        host: Registered name of the model with its scope, such as ``'mmdet.DeformableDETR'``.
        attention: A rule or a list of rules, see :func:`swap_attention`; left out where ``gates`` brings them.
        gates: File of gates, see :func:`load_gates`.
        train: ``'all'``, ``'gates'`` or ``'attention'``, see :func:`train_only_gates`.
        **host_cfg: The host's own config.

    Returns:
        An instance of the host's own class: no wrapper, no prefix in the state dict.

    Raises:
        ConfigError: The file of gates does not fit, see :func:`load_gates`.
        TypeError: A rule or the host's config is malformed.
        ValueError: ``host`` is not registered, a pattern matches nothing, or a gate does not fit, see
            :func:`swap_attention`; ``train`` is unknown.
    """
    if attention is None and gates is None:
        raise TypeError('mmgate.Gated needs attention (a rule or a list of rules) or gates (a file of gates).')
    rules = None if attention is None else parse_rules(attention)
    if isinstance(host, str) and MODELS.get(host) is None:
        raise ValueError(f'host={host!r} is not registered.{_near_host(host)}')
    model = MODELS.build(dict(type=host, **host_cfg))
    if rules is not None:
        names = swap_attention(model, rules)
        log(f'mmgate: replaced {len(names)} attention modules of {type(model).__name__}')
    if gates is not None:
        names = load_gates(model, gates)
        log(f'mmgate: loaded {len(names)} tensors of gates from {gates}')
    if train != 'all':
        train_only_gates(model, train)
    return model


def gate_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return by name the parameters that gates add to their hosts.

    Args:
        model: With gates, by whatever way they came in; a wrapper around it (DDP, EMA) adds its prefix to the names.
    """
    names = {name for name, _ in declared_parameters(model)}
    for path, swap in _swaps(model).items():  # a gate of someone's own may declare nothing
        shared = {ours for _, ours in swap.shared}
        names |= {f'{path}.{name}' for name, _ in swap.gate.named_parameters() if name not in shared}
    return {name: parameter for name, parameter in model.named_parameters() if name in names}


def train_only_gates(model: nn.Module, train: str = 'gates') -> list[str]:
    """Freeze what is not to be trained, for an optimizer that is built afterwards.

    Frozen parameters get no gradient and no state of the optimizer, and what lies before the first gate keeps no graph.
    Outside of gated attention, batch norms keep their running statistics and dropout is off, whatever the mode.

    Args:
        model: With gates.
        train: ``'gates'``: their own parameters; ``'attention'``: all of the modules that gates replaced;
            ``'all'``: everything that was trainable before.

    Returns:
        The names of the parameters that train.

    Raises:
        ValueError: ``train`` is unknown, or the model has no gates.
    """
    if train not in TRAINS:
        raise ValueError(f'train={train!r}: it is one of {", ".join(map(repr, TRAINS))}.')
    gates = gate_parameters(model)
    if not gates:
        raise ValueError(
            f'train={train!r}: this {type(model).__name__} has no gates; replace attention first '
            "(type='mmgate.Gated', or mmgate.swap_attention)."
        )
    _unfreeze(model)
    if train != 'all':
        chosen = {id(parameter) for parameter in gates.values()}
        if train == 'attention':
            chosen |= {id(parameter) for swap in _swaps(model).values() for parameter in swap.gate.parameters()}
        frozen = [
            parameter for parameter in model.parameters() if id(parameter) not in chosen and parameter.requires_grad
        ]
        for parameter in frozen:
            parameter.requires_grad_(False)
        vars(model).update(frozen_by_gates=frozen, trained_with_gates=train, train=partial(_set_mode, model))
        model.train(model.training)
    trained = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
    total = sum(parameter.numel() for parameter in model.parameters())
    log(f'mmgate: trains {sum(trained.values()):,} of {total:,} parameters ({train})')
    return list(trained)


def save_gates(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write the gates of a model, and what :func:`train_only_gates` trained with them, into a safetensors file.

    Beside the tensors it holds the rules that placed the gates and the names and shapes of the vanilla model's tensors.

    Raises:
        ConfigError: The file cannot be written, or a rule has an option that JSON cannot hold.
        ValueError: The model has no gates, or a rule's type is a class without a registered name.
    """
    model = _inner(model)
    with gates_disabled(model):
        vanilla = model.state_dict(keep_vars=True)
    state = model.state_dict(keep_vars=True)
    shared = {id(tensor) for tensor in vanilla.values()}
    gates = [name for name, tensor in state.items() if id(tensor) not in shared]
    gates += [name for name in gate_parameters(model) if name not in gates]
    if not gates:
        raise ValueError(f'this {type(model).__name__} has no gates to be saved.')
    train = vars(model).get('trained_with_gates', 'all')
    also = {name: t for name, t in vanilla.items() if train != 'all' and t.requires_grad and name not in gates}
    content = GatesFile(
        tensors={**{name: state[name] for name in gates}, **also},
        gates=gates,
        host=type(model).__name__,
        rules=_rules(model),
        shapes={name: list(tensor.shape) for name, tensor in vanilla.items() if name not in gates},
        trained=train,
    )
    write_gates(path, content)


def load_gates(model: nn.Module, path: str | os.PathLike[str]) -> list[str]:
    """Put the gates of a file into a model, vanilla or with the same gates, and return the names of what was loaded.

    What was trained beside the gates stays as the file has it when a checkpoint without gates is loaded afterwards.

    Raises:
        ConfigError: The file is none of gates, damaged, or its gates belong to a model of other tensors or are placed
            by other rules than the model's.
    """
    content = read_gates(path)
    model = _inner(model)
    with gates_disabled(model):
        own = set(gate_parameters(model))
        shapes = {name: list(t.shape) for name, t in model.state_dict().items() if name not in own}
    content.refuse_other(os.fspath(path), type(model).__name__, shapes)
    there = _rules(model)
    for prefix, rules in content.rules.items():
        if prefix not in there:
            swap_attention(model.get_submodule(prefix), rules)
        elif there[prefix] != rules:
            raise _other_rules(path, prefix, rules, there[prefix])
    strangers = sorted(set(there) - set(content.rules))
    if strangers:
        raise _other_rules(path, strangers[0], [], there[strangers[0]])
    _fill(model, content.tensors, content.gates)
    for swap in _swaps(model).values():
        swap.loaded = True
    vars(model)['gates_file'] = os.fspath(path)  # for what is said of a vanilla checkpoint that is loaded
    also = {name: tensor for name, tensor in content.tensors.items() if name not in content.gates}
    if also:
        model._register_load_state_dict_pre_hook(partial(_keep_trained, also, content.gates))
    return list(content.tensors)


def restore_attention(model: nn.Module) -> list[str]:
    """Put the vanilla modules back, in ``model`` and in the modules inside, with what they share with the gates.

    A gate that no longer stands where it was put, because someone wrapped or removed it, is left as it is.

    Returns:
        The names of the modules; none if nothing is swapped.

    Raises:
        ValueError: A parameter that was shared is gone (LoRA, parametrizations); nothing of that module is restored.
    """
    names = []
    for prefix, module in list(model.named_modules()):
        swaps = standing_swaps(module)
        for swap in swaps:  # all can be restored, or none is
            swap.follow()
        for swap in reversed(swaps):
            swap.put_vanilla(module)
        _unfreeze(module)
        for name in SWAPPED if 'attention_swaps' in vars(module) else ():
            vars(module).pop(name, None)
        names += [f'{prefix}.{swap.name}'.lstrip('.') for swap in swaps]
    return names


@contextmanager
def gates_disabled(model: nn.Module) -> Iterator[None]:
    """Let the vanilla modules compute in the place of the gates, with what they share as it is."""
    with ExitStack() as undo:
        for holder in list(model.modules()):
            for swap in standing_swaps(holder):
                swap.put_vanilla(holder)
                undo.callback(swap.put_gate, holder)
        yield


def _near_host(host: str) -> str:
    scope, _, name = host.rpartition('.')
    registry = MODELS._search_child(scope) or MODELS.root._search_child(scope) if scope else MODELS.root
    known = [] if registry is None else list(registry.module_dict)
    near = difflib.get_close_matches(name, known, n=1)
    if near:
        return f' Did you mean {".".join([scope, near[0]] if scope else near)!r}?'
    return ' Give the name with its scope, such as mmdet.DeformableDETR, and import what registers it.'


def _swaps(model: nn.Module) -> dict[str, Swap]:
    return {
        f'{prefix}.{swap.name}'.lstrip('.'): swap
        for prefix, module in model.named_modules()
        for swap in standing_swaps(module)
    }


def _rules(model: nn.Module) -> dict[str, list[dict[str, Any]]]:
    found = {prefix: vars(module).get('attention_rules') for prefix, module in model.named_modules()}
    return {
        prefix: [dict(rule, type=_named(rule['type'])) for rule in rules] for prefix, rules in found.items() if rules
    }


def _named(kind: str | type[nn.Module]) -> str:
    if isinstance(kind, str):
        return kind
    for registry in (MODELS, MODELS.root):
        if registry.get(kind.__name__) is kind:
            return kind.__name__ if registry is not MODELS else f'mmgate.{kind.__name__}'
    raise ValueError(
        f'{kind.__name__} has no registered name; register it (MODELS.register_module) to name it in files.'
    )


def _inner(model: nn.Module) -> nn.Module:
    """Return the model inside DDP and its kin."""
    inner: Any = model
    while type(inner).__name__.endswith(('DataParallel', 'AveragedModel')) and hasattr(inner, 'module'):
        inner = inner.module
    return inner


def _unfreeze(model: nn.Module) -> None:
    for parameter in vars(model).pop('frozen_by_gates', ()):
        parameter.requires_grad_(True)
    for name in ('trained_with_gates', 'train'):
        vars(model).pop(name, None)


def _set_mode(model: Any, mode: bool = True) -> nn.Module:
    type(model).train(model, mode)
    if mode:
        gates = [swap.gate for swap in _swaps(model).values()]
        gates += [module for module in model.modules() if isinstance(module, GateInit)]
        gated = {id(part) for gate in gates for part in gate.modules()}
        for module in model.modules():
            # heads and detectors ask for the mode to know whether they train; what drops and what counts are leaves,
            # and attention that drops by a function
            by_itself = not any(True for _ in module.children())
            if id(module) not in gated and (by_itself or re.search(r'Attention$|Attn$|MSA$', type(module).__name__)):
                module.eval()
    return model


@torch.no_grad()
def _fill(model: nn.Module, tensors: dict[str, Tensor], gates: list[str]) -> None:
    missing = sorted(set(gates) - set(model.state_dict()))
    if missing:
        raise ValueError(f'the gates have no {", ".join(missing[:3])}, which the file holds.')
    model.load_state_dict(tensors, strict=False)


def _keep_trained(also: dict[str, Tensor], gates: list[str], state: dict[str, Any], prefix: str, *_: Any) -> None:
    if not any(f'{prefix}{name}' in state for name in gates):  # else it is a checkpoint of the gated model
        for name, tensor in also.items():
            if f'{prefix}{name}' in state:
                state[f'{prefix}{name}'] = tensor


def _other_rules(path: Any, prefix: str, rules: Any, there: Any) -> ConfigError:
    return ConfigError(
        f'{path} holds gates that {rules or "no rules"} placed in {prefix or "the model"}; here it is {there}. '
        'Leave `attention` away, then the rules come from the file.'
    )
