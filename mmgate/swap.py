"""Swap the attention modules of any mm model, by path."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from mmgate._environment import log
from mmgate.errors import ConfigError, OptionError
from mmgate.hosts import adapter_for, gates_for, hosts_of
from mmgate.hosts.map_size import map_options
from mmgate.hosts.table import full_name, host_names, parameters_of, registered_gates
from mmgate.hosts.vits import is_in_vit
from mmgate.layers.base.dense import DenseAttention
from mmgate.layers.base.init import GateInit, random_stream
from mmgate.layers.base.map import MapAttention
from mmgate.registry import MODELS
from mmgate.weight_init import Swap, init_gate, initialise_gates_last, standing_swaps

Rules = Mapping[str, Any] | Sequence[Mapping[str, Any]]
MOST_HOSTS = 6  # that a message lists


def swap_attention(model: nn.Module, rules: Rules) -> list[str]:
    """Replace attention modules of ``model`` in place, keeping their parameters (the very same tensors).

    Args:
        model: Any module; weights, device, dtype, mode and plain attributes of the replaced modules are taken over.
        rules: One rule or a list. A rule is a dict of ``path`` (a pattern or a list of patterns over dotted names;
            ``*`` stands for anything within one name, ``**`` for any number of names; a pattern that ends with ``**``
            means every attention below that the gate can replace), ``type`` (a gate: its registered name or the
            class itself) and the gate's options. A ``map_size`` that a gate needs and the rule leaves out is read off
            the backbone, see :func:`.map_size.map_options`.

    Returns:
        The names of the replaced modules. Nothing is replaced if anything is wrong. The global random numbers stay
        where they were, and from here on the model's ``init_weights`` gives what is shared the numbers that it has in
        the vanilla model, see :func:`.weight_init.initialise_gates_last`.

    Raises:
        OptionError: A rule is malformed, its type is no gate, or an option is unknown to the gate.
        ConfigError: The gate's type is not registered, a pattern matches no module, a gate cannot replace what it met,
            or that is gated already, two rules claim one module, or one module and another inside it, or differ for a
            module of several names.
    """
    listed = parse_rules(rules)
    replacements: dict[str, nn.Module] = {}
    built: dict[int, nn.Module] = {}  # a module shared by several layers stays shared
    made_as: dict[int, tuple[type[nn.Module], dict[str, Any], str]] = {}
    claimed_by: dict[str, str] = {}
    for number, rule in enumerate(listed):
        where = f'attention[{number}]'
        gate = _gate(rule['type'], where)
        options = {key: value for key, value in rule.items() if key not in ('type', 'path')}
        _check_options(gate, options, where)
        claim = f'{where} (path={rule["path"]!r}, type={gate.__name__!r})'
        chosen: dict[str, nn.Module] = {}
        for pattern in [rule['path']] if isinstance(rule['path'], str) else rule['path']:
            chosen.update(_matches(model, pattern, gate, options, where, built))
        for name, made in chosen.items():
            if name in replacements:
                raise ConfigError(
                    f'{where}: {name} is claimed by {claimed_by[name]} already; let each path match once.'
                )
            *earlier, earlier_claim = made_as.setdefault(id(made), (gate, options, claim))
            if earlier != [gate, options]:
                raise ConfigError(f'{where}: {name} is shared, and {earlier_claim} gates it otherwise; let both agree.')
        replacements.update(chosen)
        claimed_by.update(dict.fromkeys(chosen, claim))
    for name in replacements:
        outer = next((other for other in replacements if name.startswith(f'{other}.')), None)
        if outer is not None:
            raise ConfigError(
                f'{name} lies inside {outer}, and both are to be replaced; let the paths match one of the two, most '
                f'often the outer. {_inventory(model)}'
            )
    swaps = [Swap(name, model.get_submodule(name), gate) for name, gate in replacements.items()]
    for swap in swaps:
        swap.put(model, swap.gate)
    for encoder in (module for module in model.modules() if isinstance(module, nn.TransformerEncoder)):
        if any(isinstance(part, DenseAttention) for part in encoder.modules()):
            encoder.use_nested_tensor = False  # decided for its own attention, when it was built
    initialise_gates_last(model, swaps)
    vars(model).setdefault('attention_rules', []).extend(dict(rule) for rule in listed)
    return list(replacements)


def path_regex(pattern: str) -> re.Pattern[str]:
    """Return what a pattern over dotted names means: ``*`` anything within one name, ``**`` any number of names."""
    parts = re.split(r'(\*\*|\*)', pattern)
    return re.compile(''.join({'**': '.*', '*': '[^.]*'}.get(part, re.escape(part)) for part in parts))


def attention_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield name and module of every attention in ``model``: what a gate can replace, or what is called so."""
    for name, module in model.named_modules(remove_duplicate=False):
        if gates_for(module) or re.search(r'Attention$|Attn$|MSA$', type(module).__name__):
            yield name, module


def parse_rules(rules: Rules) -> list[Mapping[str, Any]]:
    """Return rules as a list, or raise OptionError: they are malformed."""
    listed = [rules] if isinstance(rules, Mapping) else rules
    if not isinstance(listed, Sequence) or isinstance(listed, str) or not listed:
        raise OptionError(f'attention must be a rule dict(path=..., type=...) or a list of them, got {rules!r}.')
    for number, rule in enumerate(listed):
        if not isinstance(rule, Mapping) or not {'path', 'type'} <= set(rule):
            raise OptionError(f"attention[{number}] needs the keys 'path' and 'type', got {rule!r}.")
        path = rule['path']
        listed_paths = path if isinstance(path, Sequence) and not isinstance(path, str) else [path]
        if not listed_paths or not all(isinstance(one, str) and one for one in listed_paths):
            raise OptionError(f'attention[{number}].path must be a pattern or a list of some, got {path!r}.')
    return list(listed)


def _gate(kind: str | type[nn.Module], where: str) -> type[nn.Module]:
    gate = kind if inspect.isclass(kind) else MODELS.get(kind)
    if gate is None:
        ours_first = sorted(registered_gates(), key=lambda known: not known.__module__.startswith('mmgate.'))
        names = [known.__name__ for known in ours_first]
        near = difflib.get_close_matches(str(kind).rpartition('.')[2], names, n=5)
        offered = f'Did you mean{_listed(near)}' if near else f'The gates are{_listed(names)}'
        raise ConfigError(f'{where}: type={kind!r} is not registered. {offered}')
    if not host_names(gate):
        raise OptionError(
            f'{where}: {full_name(gate)} is not a gate: no adapter says what it can replace; see mmgate.adapts.'
        )
    return gate


def _matches(
    model: nn.Module,
    pattern: str,
    gate: type[nn.Module],
    options: Mapping[str, Any],
    where: str,
    built: dict[int, nn.Module],
) -> dict[str, nn.Module]:
    """Return the gates by the names that ``pattern`` matches, built once for every host module."""
    modules = {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if name and path_regex(pattern).fullmatch(name)
    }
    if not modules:
        raise ConfigError(f'{where}: path {pattern!r} matches no module. {_inventory(model)}')
    whatever_fits = pattern.endswith('**')
    gates: dict[str, nn.Module] = {}
    refusals = []
    gates_before = _gated(model)
    gated = {name: gates_before[id(module)] for name, module in modules.items() if id(module) in gates_before}
    fitting = [name for name, module in modules.items() if name not in gated and adapter_for(gate, module)]
    derived, maps = map_options(model, fitting, gate, options)
    for name, module in modules.items():
        if name in gated:
            reason = f'{name} is gated already, by a {full_name(type(gated[name]))}.'
            if not whatever_fits:
                raise ConfigError(
                    f'{where}: {reason} Leave it out of the path, or take its gate off first: '
                    'mmgate.restore_attention(model).'
                )
            if gated[name] is module:
                refusals.append(reason)
            continue
        adapter = adapter_for(gate, module)
        if whatever_fits and (adapter is None or any(name.startswith(f'{outer}.') for outer in gates)):
            continue
        if adapter is None:
            raise ConfigError(
                f'{where}: {name} is a {full_name(type(module))}, which {gate.__name__} does not replace.'
                f'{_hint(gate, module)} It replaces{_near_hosts(gate, model, module)}\n{_inventory(model)}'
            )
        try:
            if id(module) not in built:
                with random_stream(name, next(module.parameters()).device):
                    built[id(module)] = _take_over(
                        module, adapter(gate, module, **derived.get(id(module), {}), **options)
                    )
                for part in built[id(module)].modules():
                    if isinstance(part, GateInit) and is_in_vit(model, name):
                        part.in_vit = True
                init_gate(name, built[id(module)])
                made: Any = built[id(module)]
                if getattr(made, 'map_size', ()) is None:  # hosts of a class token do not tell their map
                    made.map_size = maps.get(id(module))
            gates[name] = built[id(module)]
        except TypeError as error:  # most often an option that the adapter fills
            raise OptionError(f'{where}: {full_name(gate)} cannot be made from {name}: {error}') from error
        except ValueError as error:
            if not whatever_fits:
                raise ConfigError(f'{where}: {gate.__name__} does not replace {name}: {error}') from error
            refusals.append(f'{name}: {error}')
    if not gates:
        listed = '\n  '.join(['', *refusals])
        raise ConfigError(
            f'{where}: {gate.__name__} fits nothing that {pattern!r} matches.{listed} {_inventory(model)}'
        )
    for refusal in refusals:
        log(f'mmgate: {where} leaves {refusal}')
    return gates


def _gated(model: nn.Module) -> dict[int, nn.Module]:
    """Return the gates that a swap has put into ``model``, by the ids of all their parts."""
    swaps = [swap for holder in model.modules() for swap in standing_swaps(holder)]
    return {id(part): swap.gate for swap in swaps for part in swap.gate.modules()}


def _near_hosts(gate: type[nn.Module], model: nn.Module, module: nn.Module) -> str:
    """Return the hosts of ``gate`` as lines: those that the model has, then those of the module's package, some."""
    present = {full_name(type(part)) for part in model.modules()}
    package = type(module).__module__.partition('.')[0]
    hosts = sorted(host_names(gate), key=lambda host: (host not in present, host.partition('.')[0] != package))
    further = len(hosts) - MOST_HOSTS
    return _listed([*hosts[:MOST_HOSTS], *([f'and {further} others, see docs/gates.md'] if further > 0 else [])])


def _listed(names: Sequence[str]) -> str:
    return ''.join(f'\n  {name}' for name in names)


def _hint(gate: type[nn.Module], module: nn.Module) -> str:
    base = next((host for host in hosts_of(gate) if isinstance(module, host)), None)
    if base is None:
        return ''
    ours, sub = gate.__name__, type(module).__name__
    return f' If that computes what its base does, say so: mmgate.adapts({ours}, {sub}, like={base.__name__}).'


def _check_options(gate: type, options: Mapping[str, Any], where: str) -> None:
    allowed = _options(gate)
    unknown = sorted(set(options) - allowed)
    if unknown:
        raise OptionError(
            f'{where}: {full_name(gate)} has no option {", ".join(unknown)}; it has '
            f'{", ".join(sorted(allowed)) or "none"} (sizes are taken over from the module that is replaced).'
        )


def _options(gate: type) -> set[str]:
    """Return what a rule may set: what the gate's constructor takes and its hosts' do not.

    A keyword-only argument is an option under any name, but for the sizes that every attention over a map takes.
    """
    sizes = {name for host in (DenseAttention, *hosts_of(gate)) for name in inspect.signature(host).parameters}
    of_maps = inspect.signature(MapAttention).parameters
    return {
        name
        for name, parameter in parameters_of(gate).items()
        if name not in sizes or (parameter.kind is parameter.KEYWORD_ONLY and name not in of_maps)
    }


@torch.no_grad()
def _take_over(host: nn.Module, gate: nn.Module) -> nn.Module:
    """Give the host's parameters, device, dtype, mode and plain attributes to ``gate``."""
    state = host.state_dict(keep_vars=True)
    reference = next(host.parameters())
    trainable = [(parameter, parameter.requires_grad) for parameter in host.parameters()]
    parts = [module for module in gate.modules() if isinstance(module, GateInit)]
    gate.to(device=reference.device, dtype=reference.dtype)
    try:
        unexpected = gate.load_state_dict(state, strict=False, assign=True).unexpected_keys
    finally:
        for parameter, required in trainable:  # the gate's own now; assigning reset the flag
            parameter.requires_grad_(required)
    if unexpected:
        raise ConfigError(
            f'{full_name(type(gate))} would lose parameters of {full_name(type(host))}: {", ".join(unexpected)}.'
        )
    for part in parts:  # a host's tensors fill no gate
        part.gate_loaded = False
    left_out = getattr(gate, 'without', ())
    for name, value in vars(host).items():  # code around an attention reads its sizes; what the gate has stays
        plain = not (name.startswith('_') or callable(value) or isinstance(value, torch.Tensor))
        if plain and name not in left_out and not hasattr(gate, name):
            setattr(gate, name, value)
    gate.train(host.training)  # some return nothing
    return gate


def _inventory(model: nn.Module) -> str:
    lines = []
    outer = ''
    for name, module in attention_modules(model):
        if outer and name.startswith(f'{outer}.'):
            continue  # mmcv's wrapper is to be replaced, not the module in it
        fits = ', '.join(gate.__name__ for gate in gates_for(module))
        outer = name if fits else ''
        lines.append(f'  {name}: {full_name(type(module))}, fits: {fits or "none"}')
    if not lines:
        return f'{type(model).__name__} has no attention modules.'
    return '\n'.join([f'The attention modules of {type(model).__name__} are', *lines])
