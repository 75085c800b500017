"""Swap the attention modules of any mm model, by path."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from mmengine.logging import print_log
from torch import nn

from mmgate.registry import MODELS

from .adapters import adapter_for, gates_for, hosts_of

Rules = Mapping[str, Any] | Sequence[Mapping[str, Any]]


@MODELS.register_module()
def Gated(*, host: str, attention: Rules, **host_cfg: Any) -> nn.Module:
    """Build the model ``host`` with some of its attention modules replaced.

    In a config that inherits an mm config, ``type='mmgate.Gated'``, ``host`` and ``attention`` are all that is added.

    Args:
        host: Registered name of the model with its scope, such as ``'mmdet.DeformableDETR'``.
        attention: A rule or a list of rules, see :func:`swap_attention`.
        **host_cfg: The host's own config.

    Returns:
        An instance of the host's own class: no wrapper, no prefix in the state dict.

    Raises:
        KeyError: ``host`` is not registered.
        TypeError: A rule or the host's config is malformed.
        ValueError: A pattern matches nothing, or a gate does not fit; see :func:`swap_attention`.
    """
    rules = _parse(attention)
    model = MODELS.build(dict(type=host, **host_cfg))
    swap_attention(model, rules)
    return model


def swap_attention(model: nn.Module, rules: Rules) -> list[str]:
    """Replace attention modules of ``model`` in place, keeping their parameters (the very same tensors).

    Args:
        model: Any module; weights, device, dtype and mode of the replaced modules are taken over.
        rules: One rule or a list. A rule is a dict of ``path`` (a pattern or a list of patterns over dotted names;
            ``*`` stands for anything within one name, ``**`` for any number of names), ``type`` (a registered gate) and
            the gate's options.

    Returns:
        The names of the replaced modules. Nothing is replaced if anything is wrong.

    Raises:
        KeyError: The gate's type is not registered.
        TypeError: A rule is malformed, or an option is unknown to the gate.
        ValueError: A pattern matches no module, a gate cannot replace what it met, or two rules claim one module.
    """
    replacements: dict[str, nn.Module] = {}
    built: dict[int, nn.Module] = {}  # a module shared by several layers stays shared
    for number, rule in enumerate(_parse(rules)):
        where = f'attention[{number}]'
        gate = MODELS.get(rule['type'])
        if gate is None:
            raise KeyError(f'{where}: type={rule["type"]!r} is not registered. {_inventory(model)}')
        if not hosts_of(gate):
            raise TypeError(f'{where}: {gate.__name__} is not a gate: no adapter says what it can replace.')
        options = {key: value for key, value in rule.items() if key not in ('type', 'path')}
        _check_options(gate, options, where)
        for name, module in _matches(model, rule['path'], where):
            if name in replacements:
                raise ValueError(f'{where}: {name} is claimed by an earlier rule already; let each path match once.')
            adapter = adapter_for(gate, module)
            if adapter is None:
                fits = ', '.join(host.__name__ for host in hosts_of(gate))
                raise ValueError(
                    f'{where}: {gate.__name__} replaces {fits}, but {name} is a {type(module).__name__}. '
                    f'{_inventory(model)}'
                )
            if id(module) not in built:
                built[id(module)] = _take_over(module, adapter(module, **options))
            replacements[name] = built[id(module)]
    for name, module in replacements.items():
        parent, _, leaf = name.rpartition('.')
        setattr(model.get_submodule(parent), leaf, module)
    print_log(f'mmgate: replaced {len(replacements)} attention modules', logger='current')
    return list(replacements)


def attention_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield name and module of every attention in ``model``: what a gate can replace, or what is called so."""
    for name, module in model.named_modules(remove_duplicate=False):
        if gates_for(module) or re.search(r'Attention$|Attn$|MSA$', type(module).__name__):
            yield name, module


def _parse(rules: Rules) -> list[Mapping[str, Any]]:
    listed = [rules] if isinstance(rules, Mapping) else rules
    if not isinstance(listed, Sequence) or isinstance(listed, str) or not listed:
        raise TypeError(f'attention must be a rule dict(path=..., type=...) or a list of them, got {rules!r}.')
    for number, rule in enumerate(listed):
        if not isinstance(rule, Mapping) or not {'path', 'type'} <= set(rule):
            raise TypeError(f"attention[{number}] needs the keys 'path' and 'type', got {rule!r}.")
    return list(listed)


def _matches(model: nn.Module, path: str | Sequence[str], where: str) -> list[tuple[str, nn.Module]]:
    found: dict[str, nn.Module] = {}
    modules = dict(model.named_modules(remove_duplicate=False))
    for pattern in [path] if isinstance(path, str) else path:
        matched = {name: module for name, module in modules.items() if name and _regex(pattern).fullmatch(name)}
        if not matched:
            raise ValueError(f'{where}: path {pattern!r} matches no module. {_inventory(model)}')
        found.update(matched)
    return list(found.items())


def _regex(pattern: str) -> re.Pattern[str]:
    parts = re.split(r'(\*\*|\*)', pattern)
    return re.compile(''.join({'**': '.*', '*': '[^.]*'}.get(part, re.escape(part)) for part in parts))


def _check_options(gate: type, options: Mapping[str, Any], where: str) -> None:
    own = {
        name
        for name, parameter in inspect.signature(getattr(gate, 'core', gate)).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    unknown = sorted(set(options) - own)
    if unknown:
        raise TypeError(
            f'{where}: {gate.__name__} has no option {", ".join(unknown)}; it has {", ".join(sorted(own))} '
            '(sizes are taken over from the module that is replaced).'
        )


@torch.no_grad()
def _take_over(host: nn.Module, gate: nn.Module) -> nn.Module:
    """Give the host's parameters, device, dtype and mode to ``gate``."""
    state = host.state_dict(keep_vars=True)
    reference = next(host.parameters())
    trainable = [(parameter, parameter.requires_grad) for parameter in host.parameters()]
    gate.to(device=reference.device, dtype=reference.dtype)
    unexpected = gate.load_state_dict(state, strict=False, assign=True).unexpected_keys
    if unexpected:
        raise ValueError(f'{type(gate).__name__} would lose parameters of {type(host).__name__}: {unexpected}.')
    for parameter, required in trainable:  # the gate's own now; assigning reset the flag
        parameter.requires_grad_(required)
    return gate.train(host.training)


def _inventory(model: nn.Module) -> str:
    lines = [
        f'  {name}: {type(module).__name__}, fits: {", ".join(g.__name__ for g in gates_for(module)) or "none"}'
        for name, module in attention_modules(model)
    ]
    if not lines:
        return f'{type(model).__name__} has no attention modules.'
    return '\n'.join([f'The attention modules of {type(model).__name__} are', *lines])
