"""Gate attention modules of any model, chosen by path patterns; list the attention that a model has."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from mmgate._environment import log
from mmgate.errors import ConfigError, OptionError
from mmgate.frozen import frozen_parts, refuse_unlike, warn_at_start
from mmgate.hosts import adapter_for, gates_for, hosts_of
from mmgate.hosts.map_size import map_options
from mmgate.hosts.table import (
    Adapter,
    full_name,
    gate_of_type,
    has_hosts,
    held_attention,
    host_names,
    options_of,
    registered_gates,
    why_not,
)
from mmgate.hosts.torch import switch_nested_tensors
from mmgate.hosts.vits import is_in_vit
from mmgate.layers.base.gate import Gate, draw_gate, random_stream
from mmgate.layers.base.gated import (
    CHILD,
    GatedModule,
    Record,
    bypass_of,
    gate_module,
    gated_modules,
    host_class,
    record_of,
)
from mmgate.registry import MODELS
from mmgate.starts import initialise_gates_last, note_gated
from mmgate.wrappers import named_part, named_parts, own_model, refuse_sharded

Rules = Mapping[str, Any] | Sequence[Mapping[str, Any]]
# The number of hosts that a message lists.
MOST_HOSTS = 6
# The names that packages give to the sizes of attention.
SIZES = (
    *('embed_dims', 'embed_dim', 'hidden_size', 'd_model', 'num_heads', 'num_attention_heads', 'n_heads', 'head_dim'),
    *('num_levels', 'n_levels', 'num_points', 'num_points_list', 'n_points', 'window_size', 'sr_ratio'),
)


@dataclass
class Chosen:
    """An attention module that a rule has chosen, with its adapter and the gate made for it.

    Attributes:
        name: The name in the model of the module that is gated.
        host: The module that is gated.
        adapter: The adapter of the host's family.
        gate: The gate, made for the host and not yet in it.
        child: The path to the host from the module that the rule chose; empty if the rule chose the host itself.
    """

    name: str
    host: nn.Module
    adapter: Adapter
    gate: nn.Module
    child: str = ''


def swap_attention(model: nn.Module, rules: Rules) -> list[str]:
    """Put gates into attention modules of a model in place; modules keep their parameters, hooks and names.

    Args:
        model: A module. It stays as it is if there is any error. Inside of a model of PEFT's, names are those of the
            model that it holds.
        rules: One rule or a list. A rule is a dict of ``path``, ``type`` and the gate's options. ``path`` is a pattern
            or a list of patterns over dotted names: ``*`` matches anything within one name, ``**`` any number of names,
            and ``**`` at the end every attention below that the gate fits. ``type`` is a registered name or a class. A
            ``map_size`` that a gate needs and the rule leaves out is read off the backbone, see
            :func:`.map_size.map_options`.

    Returns:
        The names of the modules that the rules chose.

    The global random numbers stay where they were. From here on the model's ``init_weights`` gives parameters of the
    host the numbers that they have in the vanilla model, see :func:`.starts.initialise_gates_last`. Gates in a part of
    the model that is frozen as a whole, while others train, are frozen, too; the first ``model.train()`` warns of them
    and of gates in a backbone's frozen stages.

    Raises:
        OptionError: A rule is malformed, its type has no gate, or the gate lacks an option.
        ConfigError: The type is not registered, a pattern matches no module, a gate does not fit a module, a module is
            gated already, two rules choose one module, or a module and another inside it, or rules differ for a module
            of several names, or for a part of the model and its frozen copy. A method of a module was replaced, so that
            the gate would not be called.
    """
    model = own_model(model)
    listed = parse_rules(rules)
    refuse_sharded(model, 'takes no gates, which would not be sharded with it; gate the model first, then shard it.')
    chosen: dict[str, Chosen] = {}
    # By identity: a module that several layers share has one gate.
    built: dict[int, Chosen] = {}
    made_as: dict[int, tuple[type[nn.Module], dict[str, Any], str]] = {}
    claimed_by: dict[str, str] = {}
    rule_of: dict[int, int] = {}
    for number, rule in enumerate(listed):
        where = f'attention[{number}]'
        rule_type = type_named(rule['type'], where)
        options = {key: value for key, value in rule.items() if key not in ('type', 'path')}
        check_options(rule_type, options, where)
        claim = f'{where} (path={rule["path"]!r}, type={rule_type.__name__!r})'
        of_rule: dict[str, Chosen] = {}
        for pattern in [rule['path']] if isinstance(rule['path'], str) else rule['path']:
            of_rule.update(_matches(model, pattern, rule_type, options, where, built))
        for name, made in of_rule.items():
            if name in chosen:
                raise ConfigError(
                    f'{where}: {name} is claimed by {claimed_by[name]} already; let each path match once.'
                )
            *earlier, earlier_claim = made_as.setdefault(id(made.host), (rule_type, options, claim))
            if earlier != [rule_type, options]:
                raise ConfigError(f'{where}: {name} is shared, and {earlier_claim} gates it otherwise; let both agree.')
            rule_of.setdefault(id(made.host), number)
        chosen.update(of_rule)
        claimed_by.update(dict.fromkeys(of_rule, claim))
    _refuse_nested(model, chosen)
    refuse_unlike(model, {host: made[:2] for host, made in made_as.items()})
    frozen = tuple(f'{name}.' for name in frozen_parts(model))
    records = [record for _, module in gated_modules(model) if (record := record_of(module)) is not None]
    first = max((record.number for record in records), default=-1) + 1
    kept = [dict(rule) for rule in listed]
    for made in {id(made.host): made for made in chosen.values()}.values():
        number = rule_of[id(made.host)]
        record = Record(made.adapter, type(made.host), made.name, kept[number], first + number, made.child)
        gate_module(made.host, made.adapter, made.gate, record)
        gated: Any = made.host
        gated.after_gating(model)
        note_gated(model, made.host)
        # A tensor that is to train and gets no gradient, as in a teacher, ends a training by DDP.
        if made.name.startswith(frozen):
            made.gate.requires_grad_(False)
    warn_at_start(model)
    switch_nested_tensors(model)
    initialise_gates_last(model)
    return list(chosen)


def path_regex(pattern: str) -> re.Pattern[str]:
    """Return the regular expression for a path pattern such as ``'encoder.layers.*.self_attn'``.

    ``*`` matches anything within one name, ``**`` any number of names.
    """
    parts = re.split(r'(\*\*|\*)', pattern)
    return re.compile(''.join({'**': '.*', '*': '[^.]*'}.get(part, re.escape(part)) for part in parts))


def attention_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield name and module of each attention in a model.

    An attention is a module that is gated, that a gate fits, or whose class is called so. A module such as mmcv's
    ``MultiheadAttention`` and the attention in it, where its gate is put, are yielded once, by the name that a rule
    takes or has taken.
    """
    held: set[str] = set()
    hosts: list[str] = []
    for name, module in named_parts(model):
        called_so = re.search(r'Attention$|Attn$|MSA$', type(module).__name__)
        is_host = isinstance(module, GatedModule) or bool(gates_for(module))
        if name in held or not (called_so or is_host):
            continue
        # transformers' deformable attention holds its operator as a module.
        inner = any(name.startswith(f'{host}.') for host in hosts) and next(module.parameters(), None) is None
        if inner and not is_host:
            continue
        if is_host:
            hosts.append(name)
        inside = dict(held_attention(module))
        if any(_was_chosen(part) for part in inside.values()):
            continue
        fits = bool(dict(held_attention(module, exactly=True)))
        held.update(
            f'{name}.{child}'.lstrip('.') for child, part in inside.items() if fits or isinstance(part, GatedModule)
        )
        yield name, module


@dataclass(frozen=True)
class Attention:
    """Description of one attention module in a model: path, class, sizes, its gate or the gates that fit.

    Attributes:
        path: Its name in the model.
        class_name: Name of its class; of a gated module, that of its vanilla class.
        sizes: The attributes in :data:`SIZES` that it has, by the names that its package gives them; ``embed_dims`` and
            ``num_heads`` where its package gives its heads no name and a gate fits.
        gates: Names that rules may give as ``type`` for it.
        gate: Name of the class of its gate, or None.
    """

    path: str
    class_name: str
    sizes: dict[str, Any]
    gates: tuple[str, ...]
    gate: str | None = None


def list_attention(model: nn.Module) -> list[Attention]:
    """Return a description of each attention module of a model, with the path that a rule takes.

    Args:
        model: Any module, of an mm package, of transformers, timm or another, gated or not.
    """
    listed = []
    for path, module in attention_modules(own_model(model)):
        sizes = {size: getattr(module, size) for size in SIZES if hasattr(module, size)}
        gates = gates_for(module)
        if not any('heads' in size for size in sizes):
            sizes.update(_sizes_of_heads(module, gates))
        names = tuple(gate.__name__ for gate in gates)
        listed.append(Attention(path, host_class(module).__name__, sizes, names, names_of_gates(module) or None))
    return listed


def _sizes_of_heads(attention: nn.Module, gates: Sequence[type]) -> dict[str, int]:
    """Return an attention's channels and number of heads, from its gate or from the adapter of a gate that fits."""
    if isinstance(attention, GatedModule):
        gate: Any = attention.gates()[0]
        return dict(embed_dims=gate.embed_dims, num_heads=gate.num_heads)
    found = adapter_for(gates[0], attention) if gates else None
    if found is None:
        return {}
    adapter, child = found
    sizes = adapter.sizes(attention.get_submodule(child))
    return dict(embed_dims=sizes.channels, num_heads=sizes.heads)


def names_of_gates(attention: nn.Module) -> str:
    """Return the class names of an attention's gates, joined by commas; empty if it is vanilla.

    Args:
        attention: A gated module, or the module around it that a rule has chosen.
    """
    gated = [part for part in (attention, *dict(held_attention(attention)).values()) if isinstance(part, GatedModule)]
    return ', '.join(dict.fromkeys(type(gate).__name__ for gate in (gated[0].gates() if gated else ())))


def _was_chosen(module: nn.Module) -> bool:
    """Return True if a rule named a gated module itself rather than a wrapper around it."""
    record = record_of(module)
    return record is not None and not record.child


def parse_rules(rules: Rules) -> list[Mapping[str, Any]]:
    """Check rules, one or several, and return them as a list.

    Raises:
        OptionError: A rule is malformed.
    """
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


def type_named(named: str | type[nn.Module], where: str) -> type[nn.Module]:
    """Return the attention class that a rule's ``type`` names.

    Args:
        named: The type: a registered name or a class.
        where: The rule, for the message.

    Raises:
        ConfigError: The name is not registered; the message has similar ones, or all, and the way to import others.
        OptionError: The class has no gate.
    """
    rule_type = named if inspect.isclass(named) else MODELS.get(named)
    if rule_type is None:
        ours_first = sorted(registered_gates(), key=lambda known: not known.__module__.startswith('mmgate.'))
        names = [known.__name__ for known in ours_first]
        near = difflib.get_close_matches(str(named).rpartition('.')[2], names, n=5)
        offered = f'Did you mean{_listed(near)}' if near else f'The gates are{_listed(names)}'
        raise ConfigError(
            f'{where}: type={named!r} is not registered. {offered}\nA gate of your own is registered once its module '
            'is imported: name the module in custom_imports, on a command line by --cfg-options '
            'custom_imports.imports=my_project.attention.'
        )
    if gate_of_type(rule_type) is None or not has_hosts(rule_type):
        raise OptionError(
            f'{where}: {full_name(rule_type)} is not a gate: it has no adapter for any host; see mmgate.adapts.'
        )
    return rule_type


def _matches(
    model: nn.Module,
    pattern: str,
    rule_type: type[nn.Module],
    options: Mapping[str, Any],
    where: str,
    built: dict[int, Chosen],
) -> dict[str, Chosen]:
    """Return the modules that a path pattern matches, by name, each with a new gate."""
    modules = {name: module for name, module in named_parts(model) if name and path_regex(pattern).fullmatch(name)}
    if not modules:
        raise ConfigError(f'{where}: path {pattern!r} matches no module. {_inventory(model)}')
    whatever_fits = pattern.endswith('**')
    adapters = {name: adapter_for(rule_type, module) for name, module in modules.items()}
    gated = {name: inner for name, module in modules.items() if (inner := _gated_in(model, module)) is not None}
    fitting = [name for name, adapter in adapters.items() if adapter and name not in gated]
    derived, maps = map_options(model, fitting, rule_type, options)
    found: dict[str, Chosen] = {}
    refusals = []
    for name, module in modules.items():
        if name in gated:
            reason = f'{name} is gated already, by a {gated[name]}.'
            if not whatever_fits:
                raise ConfigError(
                    f'{where}: {reason} Leave it out of the path, or take its gate off first: '
                    'mmgate.restore_attention(model).'
                )
            if record_of(module) is not None:
                refusals.append(reason)
            continue
        adapter = adapters[name]
        if whatever_fits and (adapter is None or any(name.startswith(f'{outer}.') for outer in found)):
            continue
        if adapter is None and issubclass(rule_type, type(module)) and isinstance(module, GatedModule):
            said = f'{where}: {name} is a {full_name(type(module))}, which no gate joins later.'
            other = f' Build it as type={rule_type.__name__!r}, or build the vanilla attention and gate that.'
            raise ConfigError(f'{said} It was built with the gate.' if rule_type is type(module) else said + other)
        if adapter is None:
            raise ConfigError(
                f'{where}: {name} is a {full_name(type(module))}, which {rule_type.__name__} does not replace.'
                f'{_hint(rule_type, module)} It replaces{_near_hosts(rule_type, model, module)}\n{_inventory(model)}'
            )
        bypass = bypass_of(module.get_submodule(adapter[1]), adapter[0])
        if bypass is not None:
            raise ConfigError(f'{where}: {rule_type.__name__} cannot act in {name}: {bypass}.')
        try:
            made = _made(model, name, adapter, rule_type, {**derived.get(id(module), {}), **options}, built)
        except TypeError as error:
            # Most often an option is one that the adapter sets.
            raise OptionError(f'{where}: {full_name(rule_type)} cannot be made for {name}: {error}') from error
        except ValueError as error:
            if not whatever_fits:
                raise ConfigError(f'{where}: {rule_type.__name__} does not replace {name}: {error}') from error
            refusals.append(f'{name}: {error}')
            continue
        gate: Any = made.gate
        # Hosts with a class token do not hand on the size of their map.
        if getattr(gate, 'map_size', ()) is None:
            gate.map_size = maps.get(id(module))
        found[name] = made
    if not found:
        listed = '\n  '.join(['', *refusals])
        raise ConfigError(
            f'{where}: {rule_type.__name__} fits nothing that {pattern!r} matches.{listed}\n{_inventory(model)}'
        )
    for refusal in refusals:
        log(f'mmgate: {where} leaves {refusal}')
    return found


def _made(
    model: nn.Module,
    name: str,
    found: tuple[Adapter, str],
    rule_type: type[nn.Module],
    options: Mapping[str, Any],
    built: dict[int, Chosen],
) -> Chosen:
    """Make and initialise the gate for one attention module, and return both with the adapter."""
    adapter, child = found
    path = f'{name}.{child}'.rstrip('.')
    host = named_part(model, path)
    if id(host) not in built:
        gate_type = gate_of_type(rule_type)
        device = next((parameter.device for parameter in host.parameters()), None)
        if getattr(host, CHILD, None) is not None:
            raise ValueError(f"this {full_name(type(host))} has an attribute 'gate' already.{adapter.own_gates}")
        with random_stream(path, device):
            gate = adapter.make_gate(host, gate_type, **options)  # type: ignore[arg-type]
        in_vit = is_in_vit(model, name)
        for inner, part in gate.named_modules():
            if isinstance(part, Gate):
                part.in_vit = in_vit
                draw_gate(f'{path}.{inner}', part)
        built[id(host)] = Chosen(path, host, adapter, gate, child)
    return built[id(host)]


def _refuse_nested(model: nn.Module, chosen: Mapping[str, Chosen]) -> None:
    for name in chosen:
        outer = next((other for other in chosen if name.startswith(f'{other}.')), None)
        if outer is not None:
            raise ConfigError(
                f'{name} lies inside {outer}, and both are to be gated; let the paths match one of the two, most '
                f'often the outer. {_inventory(model)}'
            )


def _gated_in(model: nn.Module, module: nn.Module) -> str | None:
    """Return the class name of a gate that a module, one around it or one inside it has already, or None."""
    for _, gated in gated_modules(model):
        inside = any(part is gated for part in module.modules())
        if inside or any(part is module for part in gated.modules()):
            # The record has the gate while it is switched off.
            gate = gated.gating.gate or gated.gate
            return next(type(one).__name__ for one in gate.modules() if isinstance(one, Gate))
    return None


def _near_hosts(rule_type: type[nn.Module], model: nn.Module, module: nn.Module) -> str:
    """Return lines for an error message: attention modules that a gate fits, those of this model first."""
    present = {full_name(type(part)) for part in model.modules()}
    package = type(module).__module__.partition('.')[0]
    hosts = sorted(host_names(rule_type), key=lambda host: (host not in present, host.partition('.')[0] != package))
    further = len(hosts) - MOST_HOSTS
    return _listed([*hosts[:MOST_HOSTS], *([f'and {further} others, see docs/gates.md'] if further > 0 else [])])


def _listed(names: Sequence[str]) -> str:
    return ''.join(f'\n  {name}' for name in names)


def _hint(rule_type: type[nn.Module], module: nn.Module) -> str:
    if type(module) is nn.Module or isinstance(module, fx.GraphModule):
        return ' torch.fx has traced it, and its code is part of a graph; gate the model before it is traced.'
    reason = why_not(rule_type, module)
    if reason is not None:
        return f' A {type(module).__name__} {reason}.'
    base = next((host for host in hosts_of(rule_type) if isinstance(module, host)), None)
    if base is None:
        return ''
    ours = rule_type.__name__
    sub = type(module).__name__
    return f' If that computes the same as its base, declare it: mmgate.adapts({ours}, {sub}, like={base.__name__}).'


def check_options(rule_type: type, options: Mapping[str, Any], where: str) -> None:
    """Raise OptionError if a gate does not have one of these options; the message lists those that it has."""
    allowed = set(options_of(rule_type))
    unknown = sorted(set(options) - allowed)
    if unknown:
        raise OptionError(
            f'{where}: {full_name(rule_type)} has no option {", ".join(unknown)}; it has '
            f'{", ".join(sorted(allowed)) or "none"} (sizes are those of the module that is gated).'
        )


def _inventory(model: nn.Module) -> str:
    """Return lines for an error message: each attention of a model with its class, and its gate or gates that fit."""
    lines = []
    for name, module in attention_modules(model):
        gates = names_of_gates(module)
        fits = ', '.join(rule_type.__name__ for rule_type in gates_for(module)) or 'none'
        state = f'gated by {gates}' if gates else f'fits: {fits}'
        lines.append(f'  {name}: {full_name(host_class(module))}, {state}')
    if not lines:
        return f'{type(model).__name__} has no attention modules.'
    return '\n'.join([f'The attention modules of {type(model).__name__} are', *lines])
