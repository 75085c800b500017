"""Gate attention modules of any model, chosen by path patterns.

Rules are parsed, then all gates are planned and made, then put in. Only the last step changes the model.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import fx, nn

from mmgate._environment import log
from mmgate.errors import ConfigError, OptionError
from mmgate.former import was_in_vit
from mmgate.frozen import frozen_attention
from mmgate.gate import Gate, draw_gates, random_stream
from mmgate.gates.gml import GatingModulation
from mmgate.gating import (
    Adapter,
    Record,
    bypass_of,
    computed_dtype,
    device_of,
    gate_module,
    gated_modules,
    make_gate,
    record_of,
)
from mmgate.hosts import adapter_for
from mmgate.hosts.table import adapted_base, full_name, gates_for, host_names
from mmgate.hosts.torch import switch_nested_tensors
from mmgate.listing import inventory, is_called_attention
from mmgate.rules import Rule, Rules, as_lines, parse_rules, path_regex
from mmgate.start import initialise_gates_last
from mmgate.wrappers import model_to_gate, named_part, named_parts

# The number of hosts that a message lists.
MOST_HOSTS = 6


@dataclass(frozen=True)
class Planned:
    """A gate that is made for an attention, and not yet in it.

    Attributes:
        rule: The rule.
        name: The name in the model of the module that the rule names.
        child: The path from there to the attention that is gated; empty if it is that module itself.
        attention: The attention that is gated.
        adapter: The adapter of its class.
        gate: The gate.
    """

    rule: Rule
    name: str
    child: str
    attention: nn.Module
    adapter: type[Adapter]
    gate: nn.Module

    @property
    def path(self) -> str:
        """The name in the model of the attention that is gated."""
        return f'{self.name}.{self.child}'.rstrip('.')

    @property
    def made_by(self) -> tuple[object, object]:
        """The type and the options of the gate; equal for equal gates."""
        return self.rule.gate, self.rule.options


def swap_attention(model: nn.Module, rules: Rules) -> list[str]:
    """Put gates into attention modules of a model in place; modules keep their parameters, hooks and names.

    Args:
        model: A module. It stays as it is if there is any error. Inside of a model of PEFT's, names are those of the
            model that it holds.
        rules: One rule or a list. A rule is a dict of ``path``, ``type`` and the gate's options. ``path`` is a pattern
            or a list of patterns over dotted names: ``*`` matches anything within one name, ``**`` any number of whole
            names, none included, and ``**`` at the end every attention there that the gate fits. ``type`` is a
            registered name or a class.

    Returns:
        The names of the modules that the rules chose.

    The global random numbers stay where they were. From here on the model's ``init_weights`` gives parameters of the
    host the numbers that they have in the vanilla model, see :func:`.start.initialise_gates_last`. Gates of an
    attention that is frozen in training (``requires_grad=False``, ``frozen_stages``), while other parts train, are
    frozen, too, and a warning names them.

    Raises:
        OptionError: A rule is malformed, its type has no gate, or the gate lacks an option, such as
            ``image_size`` where the model does not tell the map in pre-training.
        ConfigError: The type is not registered, a pattern matches no module, a gate does not fit a module, a module is
            gated already, two rules choose one module, or a module and another inside it, or rules differ for a module
            of several names, or for a part of the model and its frozen copy. A method of a module was replaced, so that
            the gate would not be called. The model is sharded, or in DistributedDataParallel.
    """
    model = model_to_gate(model)
    planned: dict[str, Planned] = {}
    for rule in parse_rules(rules):
        for pattern in rule.paths:
            planned.update(_plan(model, rule, pattern, planned))
    _refuse_nested(model, planned)
    once: dict[int, Planned] = {}
    for one in planned.values():
        once.setdefault(id(one.attention), one)  # several layers may share it
    frozen = frozen_attention(model, {one.path: (one.attention, one.made_by) for one in once.values()})
    _warn_of_start(model, once.values())
    # From here on nothing is refused.
    for one in once.values():
        record = Record(one.adapter, one.path, one.rule.given, one.child)
        gate_module(one.attention, one.adapter, one.gate, record)
        # A tensor that is to train and gets no gradient, as in a teacher, ends a training by DDP.
        if one.path in frozen:
            one.gate.requires_grad_(False)
    switch_nested_tensors(model)
    initialise_gates_last(model)
    return list(planned)


def _plan(model: nn.Module, rule: Rule, pattern: str, planned: Mapping[str, Planned]) -> dict[str, Planned]:
    """Make the gates of all modules that a pattern of a rule matches, and return them by the names of these modules.

    Args:
        model: The model, which stays as it is.
        rule: The rule.
        pattern: One of its patterns. One that ends with ``**`` means every attention there that the gate fits.
        planned: The gates of the rules and patterns before.
    """
    regex = path_regex(pattern)
    matched = {name: module for name, module in named_parts(model) if name and regex.fullmatch(name)}
    if not matched:
        raise ConfigError(f'{rule.where}: path {pattern!r} matches no module. {inventory(model)}')
    whatever_fits = pattern.endswith('**')
    new: dict[str, Planned] = {}
    refusals: list[str] = []
    for name, module in matched.items():
        present = _gate_in(model, module)
        found = None if present else adapter_for(rule.gate, module)
        if found is None:
            if not whatever_fits:
                raise ConfigError(f'{rule.where}: {_not_replaced(model, rule, name, module, present)}')
            if record_of(module) is not None:
                refusals.append(f'{name} is gated already, by a {present}.')
            continue
        if whatever_fits and any(name.startswith(f'{outer}.') for outer in new):
            continue
        adapter, child = found
        path = f'{name}.{child}'.rstrip('.')
        attention = named_part(model, path)
        bypass = bypass_of(attention, adapter)
        if bypass is not None:
            raise ConfigError(f'{rule.where}: {rule.name} cannot act in {name}: {bypass}.')
        twin = next((one for one in (*planned.values(), *new.values()) if one.attention is attention), None)
        _refuse_other_rule(rule, name, planned.get(name), twin)
        if twin is not None and adapter.around(model, path) != adapter.around(model, twin.path):
            raise ConfigError(f'{rule.where}: {name} is shared with {twin.name}, which sees another map.')
        try:
            gate = _gate(model, rule, path, attention, adapter) if twin is None else twin.gate
        except OptionError as error:
            raise OptionError(f'{rule.where}: {rule.name} in {name}: {error}') from error
        except ValueError as error:
            if not whatever_fits:
                raise ConfigError(f'{rule.where}: {rule.name} does not replace {name}: {error}') from error
            refusals.append(f'{name}: {error}')
            continue
        new[name] = Planned(rule, name, child, attention, adapter, gate)
    if not new:
        raise ConfigError(
            f'{rule.where}: {rule.name} fits nothing that {pattern!r} matches.{as_lines(refusals)}\n{inventory(model)}'
        )
    for refusal in refusals:
        log(f'mmgate: {rule.where} leaves {refusal}')
    return new


def _gate(model: nn.Module, rule: Rule, path: str, attention: nn.Module, adapter: type[Adapter]) -> nn.Module:
    """Make and initialise the gate of an attention, from a random stream of the attention's name."""
    device = device_of(attention, model)
    # Not on the device of a ``with torch.device`` around: its generator would be moved.
    with torch.device('cpu'), random_stream(path):
        gate = make_gate(adapter, attention, rule.gate, model, path, **rule.options)
    draw_gates(path, gate)
    return gate.to(device=device, dtype=computed_dtype(attention, model))


def _refuse_other_rule(rule: Rule, name: str, claimed: Planned | None, shared: Planned | None) -> None:
    """Raise ConfigError if another rule has chosen a module, or gates the attention in it by another of its names.

    Args:
        rule: The rule that chooses it now.
        name: The name of the module.
        claimed: What an earlier pattern has planned for this name.
        shared: What one has planned for the attention, under whatever name.
    """
    if claimed is not None and claimed.rule is not rule:
        raise ConfigError(f'{rule.where}: {name} is claimed by {claimed.rule.claim} already; let each path match once.')
    if shared is not None and shared.made_by != (rule.gate, rule.options):
        raise ConfigError(
            f'{rule.where}: {name} is shared, and {shared.rule.claim} gates it otherwise; let both agree.'
        )


def _refuse_nested(model: nn.Module, names: Collection[str]) -> None:
    """Raise ConfigError if one of the modules that rules choose lies inside another."""
    for name in names:
        outer = next((other for other in names if name.startswith(f'{other}.')), None)
        if outer is not None:
            raise ConfigError(
                f'{name} lies inside {outer}, and both are to be gated; let the paths match one of the two, most '
                f'often the outer. {inventory(model)}'
            )


def _warn_of_start(model: nn.Module, planned: Iterable[Planned]) -> None:
    """Warn once a rule of gates whose start 0.2 took from the model around them; to be removed in 0.4."""
    first: dict[int, Planned] = {}
    for one in planned:
        if any(isinstance(part, GatingModulation) and part.init == 'paper' for part in one.gate.modules()):
            names = one.name.split('.')
            around = (type(model.get_submodule('.'.join(names[:count]))) for count in range(len(names) + 1))
            if was_in_vit(around):
                first.setdefault(id(one.rule), one)
    for one in first.values():
        log(
            f"mmgate: {one.rule.where}: since 0.3 init='paper' starts gates as in detectors, in {one.name}, too, which "
            "is part of a vision transformer. Write init='vit' for their start of 0.2.0.",
            logging.WARNING,
        )


def _gate_in(model: nn.Module, module: nn.Module) -> str | None:
    """Return the class name of a gate that a module, one around it or one inside it has already, or None."""
    for _, gated in gated_modules(model):
        inside = any(part is gated for part in module.modules())
        if inside or any(part is module for part in gated.modules()):
            return type(gated.gates()[0]).__name__
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
        f'replaces{_near_hosts(rule.gate, model, module)}\n{inventory(model)}'
    )


def _near_hosts(gate: type[Gate], model: nn.Module, module: nn.Module) -> str:
    """Return lines for an error message: attention modules that a gate fits, those of this model first."""
    present = {full_name(type(part)) for part in model.modules()}
    package = type(module).__module__.partition('.')[0]
    hosts = sorted(host_names(gate), key=lambda host: (host not in present, host.partition('.')[0] != package))
    further = len(hosts) - MOST_HOSTS
    return as_lines([*hosts[:MOST_HOSTS], *([f'and {further} others, see docs/gates.md'] if further > 0 else [])])


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
    if not is_called_attention(module):
        return ''
    return f' No adapter knows that class. If it computes the same as another, declare it: {declared}...).'
