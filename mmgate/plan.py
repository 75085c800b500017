"""Plan the gates of a model: find the attention that rules name, and make its gates; the model stays as it is."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from mmgate._environment import log
from mmgate.adapter import Adapter, gated_modules, initialised_gate, record_of, why_not_called
from mmgate.errors import ConfigError, OptionError, full_name
from mmgate.gate import Gate
from mmgate.hosts.table import adapted_base, adapter_for, gates_for, host_names
from mmgate.listing import attention_in_words, looks_like_attention
from mmgate.rules import Rule, as_lines
from mmgate.wrappers import named_part, named_parts

# The number of hosts that a message lists.
MOST_HOSTS = 6


@dataclass(frozen=True)
class Planned:
    """A gate that is made for an attention (the host), and not yet in it.

    Attributes:
        rule: The rule.
        chosen: The name in the model of the module that the rule chose.
        inner: The path from there to the host; empty if it is that module itself.
        host: The attention that is gated.
        adapter: The adapter of its class.
        gate: The gate.
    """

    rule: Rule
    chosen: str
    inner: str
    host: nn.Module
    adapter: type[Adapter]
    gate: nn.Module

    @property
    def name(self) -> str:
        """The name in the model of the host."""
        return f'{self.chosen}.{self.inner}'.rstrip('.')


def plan_gates(model: nn.Module, rules: Sequence[Rule]) -> dict[str, Planned]:
    """Make the gates of all modules that rules name, and return them by the names of these modules.

    Args:
        model: The model, which stays as it is.
        rules: The rules.

    Raises:
        OptionError: A gate lacks an option, such as ``image_size`` where the model does not tell the map.
        ConfigError: A pattern matches no module, a gate does not fit a module, a module is gated already, or rules
            contradict each other.
    """
    planned: dict[str, Planned] = {}
    for rule in rules:
        for pattern, regex in rule.patterns.items():
            planned.update(_plan(model, rule, pattern, regex, planned))
    _refuse_nested(model, planned)
    return planned


def _plan(
    model: nn.Module, rule: Rule, pattern: str, regex: re.Pattern[str], planned: Mapping[str, Planned]
) -> dict[str, Planned]:
    """Make the gates of all modules that a pattern of a rule matches, and return them by the names of these modules.

    Args:
        model: The model.
        rule: The rule.
        pattern: One of its patterns. One that ends with ``**`` means every attention there that the gate fits.
        regex: The pattern as a regular expression.
        planned: The gates of the rules and patterns before.
    """
    matched = {name: module for name, module in named_parts(model) if name and regex.fullmatch(name)}
    if not matched:
        raise ConfigError(f'{rule.where}: path {pattern!r} matches no module. {attention_in_words(model)}')
    whatever_fits = pattern.endswith('**')
    gated = [part for _, part in gated_modules(model)]
    new: dict[str, Planned] = {}
    refusals: list[str] = []
    for name, module in matched.items():
        present = _gate_in(gated, module)
        found = None if present else adapter_for(rule.gate, module)
        if found is None:
            if not whatever_fits:
                raise ConfigError(f'{rule.where}: {_not_replaced(model, rule, name, module, present)}')
            if record_of(module) is not None:
                refusals.append(f'{name} is gated already, by a {present}.')
            continue
        if whatever_fits and any(name.startswith(f'{outer}.') for outer in new):
            continue
        earlier = planned.get(name)
        if earlier is not None and earlier.rule is not rule:
            raise ConfigError(f'{rule.where}: {name} is claimed by {earlier.rule} already; let each path match once.')
        adapter, inner = found
        host_name = f'{name}.{inner}'.rstrip('.')
        host = named_part(model, host_name)
        reason = why_not_called(host, adapter)
        if reason is not None:
            raise ConfigError(f'{rule.where}: {rule.name} cannot act in {name}: {reason}.')
        other = next((one for one in (*planned.values(), *new.values()) if one.host is host), None)
        if other is not None:
            new[name] = Planned(rule, name, inner, host, adapter, _shared_gate(model, rule, name, host_name, other))
            continue
        try:
            gate = initialised_gate(adapter, host, rule.gate, host_name, model, **rule.options)
        except OptionError as error:
            raise OptionError(f'{rule.where}: {rule.name} in {name}: {error}') from error
        except ValueError as error:
            if not whatever_fits:
                raise ConfigError(f'{rule.where}: {rule.name} does not replace {name}: {error}') from error
            refusals.append(f'{name}: {error}')
            continue
        new[name] = Planned(rule, name, inner, host, adapter, gate)
    if not new:
        raise ConfigError(
            f'{rule.where}: {rule.name} fits nothing that {pattern!r} matches.{as_lines(refusals)}\n'
            f'{attention_in_words(model)}'
        )
    for refusal in refusals:
        log(f'mmgate: {rule.where} leaves {refusal}')
    return new


def _shared_gate(model: nn.Module, rule: Rule, name: str, host_name: str, other: Planned) -> nn.Module:
    """Return the gate of an attention that has another name, too; raise ConfigError if the two names differ."""
    if other.rule.gate_and_options != rule.gate_and_options:
        raise ConfigError(f'{rule.where}: {name} is shared, and {other.rule} gates it otherwise; let both agree.')
    if other.adapter.sizes_from_model(model, host_name) != other.adapter.sizes_from_model(model, other.name):
        raise ConfigError(f'{rule.where}: {name} is shared with {other.chosen}, which sees another map.')
    return other.gate


def _refuse_nested(model: nn.Module, names: Collection[str]) -> None:
    """Raise ConfigError if one of the modules that rules choose lies inside another."""
    for name in names:
        outer = next((other for other in names if name.startswith(f'{other}.')), None)
        if outer is not None:
            raise ConfigError(
                f'{name} lies inside {outer}, and both are to be gated; let the paths match one of the two, most '
                f'often the outer. {attention_in_words(model)}'
            )


def _gate_in(gated: Sequence[Any], module: nn.Module) -> str | None:
    """Return the class name of a gate that a module, one around it or one inside it has already, or None."""
    for one in gated:
        if any(part is one for part in module.modules()) or any(part is module for part in one.modules()):
            return type(one.gates()[0]).__name__
    return None


def _not_replaced(model: nn.Module, rule: Rule, name: str, module: nn.Module, present: str | None) -> str:
    """Return the message for a module that a rule names and no gate of its type can be put into.

    Args:
        model: The model.
        rule: The rule.
        name: The name of the module.
        module: The module.
        present: The class name of the gate that is there already, or None.
    """
    if present is not None:
        return (
            f'{name} is gated already, by a {present}. Leave it out of the path, or take its gate off first: '
            'mmgate.restore_attention(model).'
        )
    return (
        f'{name} is a {full_name(type(module))}, which {rule.name} does not replace.{_hint(rule, module)} It '
        f'{_near_hosts(rule.gate, model, module)}\n{attention_in_words(model)}'
    )


def _near_hosts(gate: type[Gate], model: nn.Module, module: nn.Module) -> str:
    """Return the end of an error message: attention modules that a gate replaces, those of this model first."""
    present = {full_name(type(part)) for part in model.modules()}
    package = type(module).__module__.partition('.')[0]
    hosts = sorted(host_names(gate), key=lambda host: (host not in present, host.partition('.')[0] != package))
    further = len(hosts) - MOST_HOSTS
    if not hosts:
        return 'has no adapter for any host; see mmgate.adapts.'
    others = [f'and {further} others, see docs/gates.md'] if further > 0 else []
    return f'replaces{as_lines([*hosts[:MOST_HOSTS], *others])}'


def _hint(rule: Rule, module: nn.Module) -> str:
    if type(module) is nn.Module or isinstance(module, fx.GraphModule):
        return ' torch.fx has traced it, and its code is part of a graph; gate the model before it is traced.'
    cls = type(module)
    declared = f'mmgate.adapts({rule.name}, {cls.__name__}, like='
    base = adapted_base(rule.gate, cls)
    if base is not None:
        return f' If that computes the same as its base, declare it: {declared}{base.__name__}).'
    others = ', '.join(one.__name__ for one in gates_for(module))
    if others:
        return f' It takes {others}; another gate may fit a module inside or around it.'
    if not looks_like_attention(module):
        return ''
    return f' No adapter knows that class. If it computes the same as another, declare it: {declared}...).'
