"""Gate attention modules of any model, chosen by path patterns: parse the rules, find, make the gates, commit.

Each of the four steps returns what the next one takes. Only the last one changes the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from mmgate._environment import log
from mmgate.errors import ConfigError, OptionError
from mmgate.frozen import frozen_in_training, refuse_unlike, warn_of_frozen
from mmgate.hosts import adapter_for
from mmgate.hosts.map_size import Derived, map_options
from mmgate.hosts.table import Adapter, adapted_base, full_name, gate_of_type, host_names, options_of
from mmgate.hosts.torch import switch_nested_tensors
from mmgate.layers.base.gate import draw_gates, random_stream
from mmgate.layers.base.gated import (
    CHILD,
    Record,
    bypass_of,
    computed_dtype,
    device_of,
    gate_module,
    gated_modules,
    record_of,
)
from mmgate.layers.base.starts import initialise_gates_last
from mmgate.listing import inventory, is_called_attention
from mmgate.rules import Rule, Rules, as_lines, parse_rules, path_regex
from mmgate.wrappers import named_part, named_parts, own_model, refuse_replicated, refuse_sharded

# The number of hosts that a message lists.
MOST_HOSTS = 6


@dataclass(frozen=True)
class Host:
    """An attention module that a rule names and an adapter fits.

    Attributes:
        name: The name in the model of the module that the rule names.
        child: The path from there to the module that is gated; empty if it is that module itself.
        module: The module that is gated.
        adapter: The adapter of its family.
    """

    name: str
    child: str
    module: nn.Module
    adapter: Adapter

    @property
    def path(self) -> str:
        """The name in the model of the module that is gated."""
        return f'{self.name}.{self.child}'.rstrip('.')


@dataclass(frozen=True)
class Found:
    """The hosts that a pattern of a rule matches.

    Attributes:
        rule: The rule.
        pattern: The pattern, one of the rule's.
        hosts: The hosts, in the order of the model.
        refusals: Of a pattern that takes whatever fits, the reasons why modules were left out.
    """

    rule: Rule
    pattern: str
    hosts: list[Host] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)

    @property
    def whatever_fits(self) -> bool:
        """True for a pattern that ends with ``**``: it means every attention there that the gate fits."""
        return self.pattern.endswith('**')


@dataclass(frozen=True)
class Made:
    """A host and the gate that was made for it, by a rule, and is not yet in it."""

    rule: Rule
    host: Host
    gate: nn.Module


def swap_attention(model: nn.Module, rules: Rules) -> list[str]:
    """Put gates into attention modules of a model in place; modules keep their parameters, hooks and names.

    Args:
        model: A module. It stays as it is if there is any error. Inside of a model of PEFT's, names are those of the
            model that it holds.
        rules: One rule or a list. A rule is a dict of ``path``, ``type`` and the gate's options. ``path`` is a pattern
            or a list of patterns over dotted names: ``*`` matches anything within one name, ``**`` any number of whole
            names, none included, and ``**`` at the end every attention there that the gate fits. ``type`` is a
            registered name or a class. A ``map_size`` that a gate needs and the rule leaves out is read off the
            backbone, see :func:`.map_size.map_options`.

    Returns:
        The names of the modules that the rules chose.

    The global random numbers stay where they were. From here on the model's ``init_weights`` gives parameters of the
    host the numbers that they have in the vanilla model, see :func:`.starts.initialise_gates_last`. Gates of an
    attention that is frozen in training (``requires_grad=False``, ``frozen_stages``), while other parts train, are
    frozen, too, and a warning names them.

    Raises:
        OptionError: A rule is malformed, its type has no gate, or the gate lacks an option.
        ConfigError: The type is not registered, a pattern matches no module, a gate does not fit a module, a module is
            gated already, two rules choose one module, or a module and another inside it, or rules differ for a module
            of several names, or for a part of the model and its frozen copy. A method of a module was replaced, so that
            the gate would not be called. The model is sharded, or in DistributedDataParallel.
    """
    refuse_sharded(model, 'takes no gates, which would not be sharded with it; gate the model first, then shard it.')
    refuse_replicated(model)
    model = own_model(model)
    return commit(model, make(model, find(model, parse_rules(rules))))


def find(model: nn.Module, rules: Sequence[Rule]) -> list[Found]:
    """Find the modules that rules name, and the adapter of each.

    Raises:
        ConfigError: A pattern matches no module, or a module that is gated already or that the gate does not replace.
    """
    return [_found(model, rule, pattern) for rule in rules for pattern in rule.paths]


def _found(model: nn.Module, rule: Rule, pattern: str) -> Found:
    modules = {name: module for name, module in named_parts(model) if name and path_regex(pattern).fullmatch(name)}
    if not modules:
        raise ConfigError(f'{rule.where}: path {pattern!r} matches no module. {inventory(model)}')
    found = Found(rule, pattern)
    for name, module in modules.items():
        gate = _gated_in(model, module)
        adapted = None if gate else adapter_for(rule.type, module)
        if gate and not found.whatever_fits:
            raise ConfigError(
                f'{rule.where}: {name} is gated already, by a {gate}. Leave it out of the path, or take its gate off '
                'first: mmgate.restore_attention(model).'
            )
        if gate and record_of(module) is not None:
            found.refusals.append(f'{name} is gated already, by a {gate}.')
        elif adapted:
            adapter, child = adapted
            path = f'{name}.{child}'.rstrip('.')
            found.hosts.append(Host(name, child, named_part(model, path), adapter))
        elif not found.whatever_fits:
            raise ConfigError(_does_not_replace(model, rule, name, module))
    return found


def make(model: nn.Module, found: Sequence[Found]) -> list[Made]:
    """Make and initialise the gates; a module of several names gets one. The model stays as it is.

    Raises:
        OptionError: A gate needs an option that its rule leaves out.
        ConfigError: A gate does not fit its host, or would not be called there; two rules choose one module, or a
            module and another inside it; or they differ for a module of several names.
    """
    made: dict[str, Made] = {}
    # By identity: a module that several layers share has one gate.
    first: dict[int, Made] = {}
    for one in found:
        rule = one.rule
        # A later pattern of a rule may match a module again.
        others = {name: other.rule for name, other in made.items() if other.rule is not rule}
        new = _fitting(model, one, first)
        for name, gated in new.items():
            if name in others:
                raise ConfigError(
                    f'{rule.where}: {name} is claimed by {others[name].claim} already; let each path match once.'
                )
            before = first[id(gated.host.module)].rule
            if (before.type, before.options) != (rule.type, rule.options):
                raise ConfigError(
                    f'{rule.where}: {name} is shared, and {before.claim} gates it otherwise; let both agree.'
                )
        made.update(new)
    for name in made:
        outer = next((other for other in made if name.startswith(f'{other}.')), None)
        if outer is not None:
            raise ConfigError(
                f'{name} lies inside {outer}, and both are to be gated; let the paths match one of the two, most '
                f'often the outer. {inventory(model)}'
            )
    return list(made.values())


def _fitting(model: nn.Module, found: Found, first: dict[int, Made]) -> dict[str, Made]:
    """Return the hosts that a gate fits, by name, each with its gate.

    Args:
        model: The model.
        found: The hosts that a pattern matches.
        first: What was made first for each module, by its id; a module that has a gate there gets that one.
    """
    rule = found.rule
    derived = map_options(model, {host.name: host.adapter for host in found.hosts}, rule.type, rule.options)
    made: dict[str, Made] = {}
    refusals = [*found.refusals]
    for host in found.hosts:
        if found.whatever_fits and any(host.name.startswith(f'{outer}.') for outer in made):
            continue
        bypass = bypass_of(host.module, host.adapter)
        if bypass is not None:
            raise ConfigError(f'{rule.where}: {rule.type.__name__} cannot act in {host.name}: {bypass}.')
        shared = first.get(id(host.module))
        told = derived.get(host.name, Derived())
        _refuse_missing_options(rule, host, {**told.options, **rule.options})
        try:
            gate = _gate(model, rule, host, told) if shared is None else shared.gate
        except ValueError as error:
            if not found.whatever_fits:
                raise ConfigError(
                    f'{rule.where}: {rule.type.__name__} does not replace {host.name}: {error}'
                ) from error
            refusals.append(f'{host.name}: {error}')
            continue
        made[host.name] = Made(rule, host, gate)
        first.setdefault(id(host.module), made[host.name])
    if not made:
        raise ConfigError(
            f'{rule.where}: {rule.type.__name__} fits nothing that {found.pattern!r} matches.{as_lines(refusals)}\n'
            f'{inventory(model)}'
        )
    for refusal in refusals:
        log(f'mmgate: {rule.where} leaves {refusal}')
    return made


def _gate(model: nn.Module, rule: Rule, host: Host, derived: Derived) -> nn.Module:
    """Make and initialise the gate of a host, from a random stream of its name."""
    gate_type: Any = gate_of_type(rule.type)
    if getattr(host.module, CHILD, None) is not None:
        kind = full_name(type(host.module))
        raise ConfigError(f"this {kind} has an attribute 'gate' already.{host.adapter.own_gates}")
    names = host.name.split('.')
    around = [type(model.get_submodule('.'.join(names[:count]))) for count in range(len(names) + 1)]
    surroundings = dict(in_vit=host.adapter.is_in_vit(around), map_size=derived.map_size)
    surroundings.update(host.adapter.around(model, host.path))
    device = device_of(host.module, model)
    # Not on the device of a ``with torch.device`` around: its generator would be moved.
    with torch.device('cpu'), random_stream(host.path):
        gate = host.adapter.make_gate(host.module, gate_type, surroundings, **{**derived.options, **rule.options})
    draw_gates(host.path, gate)
    return gate.to(device=device, dtype=computed_dtype(host.module, model))


def _refuse_missing_options(rule: Rule, host: Host, options: Mapping[str, Any]) -> None:
    known = options_of(rule.type)
    missing = [name for name, option in known.items() if option.default is option.empty and name not in options]
    if missing:
        raise OptionError(
            f'{rule.where}: {full_name(rule.type)} cannot be made for {host.name} without {", ".join(missing)}; write '
            f'it into the rule, as in {missing[0]}=...'
        )


def commit(model: nn.Module, made: Sequence[Made]) -> list[str]:
    """Put gates into their hosts, and prepare the model for its initialisation and training with them.

    Returns:
        The names of the modules that the rules chose.

    Raises:
        ConfigError: Rules differ for a part of the model and its frozen copy.
    """
    once: dict[int, Made] = {}
    for one in made:
        once.setdefault(id(one.host.module), one)
    refuse_unlike(model, {module: (one.rule.type, one.rule.options) for module, one in once.items()})
    resting = frozen_in_training(model, {one.host.path: one.host.module for one in once.values()})
    warn_of_frozen(model, resting)
    for one in once.values():
        host = one.host
        gate_module(host.module, host.adapter, one.gate, Record(host.adapter, host.path, one.rule.given, host.child))
        gated: Any = host.module
        gated.after_gating(model)
        # A tensor that is to train and gets no gradient, as in a teacher, ends a training by DDP.
        if host.path in resting:
            one.gate.requires_grad_(False)
    switch_nested_tensors(model)
    initialise_gates_last(model)
    return [one.host.name for one in made]


def _gated_in(model: nn.Module, module: nn.Module) -> str | None:
    """Return the class name of a gate that a module, one around it or one inside it has already, or None."""
    for _, gated in gated_modules(model):
        inside = any(part is gated for part in module.modules())
        if inside or any(part is module for part in gated.modules()):
            return type(gated.gates()[0]).__name__
    return None


def _does_not_replace(model: nn.Module, rule: Rule, name: str, module: nn.Module) -> str:
    """Return the message for a module that a rule names and no adapter fits: why, and what the gate replaces."""
    said = f'{rule.where}: {name} is a {full_name(type(module))}'
    return (
        f'{said}, which {rule.type.__name__} does not replace.{_hint(rule.type, module)} It '
        f'replaces{_near_hosts(rule.type, model, module)}\n{inventory(model)}'
    )


def _near_hosts(rule_type: type[nn.Module], model: nn.Module, module: nn.Module) -> str:
    """Return lines for an error message: attention modules that a gate fits, those of this model first."""
    present = {full_name(type(part)) for part in model.modules()}
    package = type(module).__module__.partition('.')[0]
    hosts = sorted(host_names(rule_type), key=lambda host: (host not in present, host.partition('.')[0] != package))
    further = len(hosts) - MOST_HOSTS
    return as_lines([*hosts[:MOST_HOSTS], *([f'and {further} others, see docs/gates.md'] if further > 0 else [])])


def _hint(rule_type: type[nn.Module], module: nn.Module) -> str:
    if type(module) is nn.Module or isinstance(module, fx.GraphModule):
        return ' torch.fx has traced it, and its code is part of a graph; gate the model before it is traced.'
    kind = type(module)
    declared = f'mmgate.adapts({rule_type.__name__}, {kind.__name__}, like='
    base = adapted_base(rule_type, kind)
    if base is not None:
        return f' If that computes the same as its base, declare it: {declared}{base.__name__}).'
    if not is_called_attention(module):
        return ''
    return f' No adapter knows that class. If it computes the same as another, declare it: {declared}...).'
