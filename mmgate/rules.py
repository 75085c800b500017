"""Parse rules, which a config has as dicts and the option ``--gate`` as text, ``PATH=TYPE(option=value, ...)``."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from mmgate.errors import ConfigError, OptionError, full_name
from mmgate.former import refuse_former_options
from mmgate.gate import Gate, gate_of_type, gate_options, registered_gates
from mmgate.gates.base.map import MapGate
from mmgate.moved import how_to_import
from mmgate.registry import MODELS

Rules = Mapping[str, Any] | Sequence[Mapping[str, Any]]
FORM = 'PATH=TYPE(option=value, ...)'
EXAMPLE = "encoder.layers.*.self_attn=PLuGMultiheadAttention(gml='sum')"
OPEN = '([{'
CLOSED = ')]}'
# By the name of a type in an annotation, the type of values that an option takes; others are not checked.
VALUE_TYPES = {'int': 'number', 'float': 'number', 'bool': 'number', 'str': 'text', 'None': 'None', 'tuple': 'tuple'}


@dataclass(frozen=True)
class Rule:
    """A rule of a config whose type is a gate and whose options that gate has.

    Attributes:
        where: Name of the rule in messages, such as ``attention[0]``.
        patterns: Patterns of the modules' names, with their regular expressions, see :func:`path_regex`.
        gate: Class of the gate that the rule's ``type`` says.
        options: Options of the gate.
        given: The rule as the config has it.
    """

    where: str
    patterns: Mapping[str, re.Pattern[str]]
    gate: type[Gate]
    options: Mapping[str, Any]
    given: Mapping[str, Any]

    def __str__(self) -> str:
        return f'{self.where} (path={self.given["path"]!r}, type={self.name!r})'

    @property
    def name(self) -> str:
        """The rule's ``type`` in the words of a message."""
        return name_of_type(self.given)

    @property
    def gate_and_options(self) -> tuple[object, object]:
        """The type and the options of its gates; equal for equal gates."""
        return self.gate, self.options


def parse_rules(rules: Rules) -> list[Rule]:
    """Check rules as a config has them, one or several, and return them.

    Raises:
        OptionError: A rule is malformed, its type has no gate, or the gate lacks an option.
        ConfigError: The type is not registered.
    """
    parsed = []
    for number, rule in enumerate(list_rules(rules)):
        where = f'attention[{number}]'
        gate, options = _gate_and_options(rule, where)
        paths = (rule['path'],) if isinstance(rule['path'], str) else tuple(rule['path'])
        patterns = {path: path_regex(path) for path in paths}
        parsed.append(Rule(where, patterns, gate, options, dict(rule)))
    return parsed


def list_rules(rules: Rules) -> list[Mapping[str, Any]]:
    """Return rules, one or several, as a list, without a look at their types.

    Raises:
        OptionError: A rule is malformed.
        ConfigError: A path is malformed, see :func:`path_regex`.
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
        for one in listed_paths:
            path_regex(one)
    return list(listed)


def check_rules(rules: Sequence[Mapping[str, Any]]) -> None:
    """Raise an error, before a model is built, for rules with an unknown type or a wrong option.

    Raises:
        ConfigError: A rule is wrong; the message has the rule and the types or options that there are.
    """
    for rule in rules:
        _gate_and_options(rule, f'--gate {write_rule(rule)}')


def gate_named(named: Any, where: str) -> type[Gate]:
    """Return the class of the gate that a rule's ``type`` says.

    Args:
        named: The type: a gate's class or a registered name, such as that of a function that builds attention with it.
        where: The rule, for the message.

    Raises:
        ConfigError: The name is not registered; the message has similar ones, or all, and the way to import others.
        OptionError: It is no gate.
    """
    rule_type: Any = MODELS.get(named) if isinstance(named, str) else named
    moved = how_to_import(named) if isinstance(named, str) and gate_of_type(rule_type) is None else None
    if moved is not None:
        raise ConfigError(f'{where}: {moved}')
    if rule_type is None:
        ours_first = sorted(registered_gates(), key=lambda known: not known.__module__.startswith('mmgate.'))
        names = [known.__name__ for known in ours_first]
        near = difflib.get_close_matches(str(named).rpartition('.')[2], names, n=5)
        offered = f'Did you mean{as_lines(near)}' if near else f'The gates are{as_lines(names)}'
        raise ConfigError(
            f'{where}: type={named!r} is not registered. {offered}\nA gate of your own is registered once its module '
            'is imported: name the module in custom_imports, on a command line by --cfg-options '
            'custom_imports.imports=my_project.attention.'
        )
    gate = gate_of_type(rule_type)
    if gate is None:
        said = full_name(rule_type) if isinstance(rule_type, type) else repr(rule_type)
        raise OptionError(f'{where}: {said} is not a gate, a subclass of mmgate.Gate with hosts by mmgate.adapts.')
    return gate


def path_regex(pattern: str) -> re.Pattern[str]:
    """Return the regular expression for a path pattern such as ``'encoder.layers.*.self_attn'``.

    ``*`` matches anything within one name. ``**`` matches any number of whole names, none included: ``**.attn`` matches
    ``attn``, and ``encoder.**`` also ``encoder``.

    Raises:
        ConfigError: ``**`` is only a part of a name, as in ``encoder**``.
    """
    # Dots join the names. After leading ** a name may be the path's first, so that it starts the text or follows a dot.
    start_or_dot = separator = r'(?:^|\.)'
    regex = ''
    for name in pattern.split('.'):
        if name == '**':
            regex += rf'(?:{start_or_dot}[^.]+)*'
            continue
        if '**' in name:
            whole = re.sub(r'\*{2,}', '.**.', name).strip('.')
            raise ConfigError(
                f'path {pattern!r}: ** means any number of whole names, so write {whole!r} instead of {name!r}, or a '
                'single * for any letters within a name.'
            )
        regex += separator + re.escape(name).replace(r'\*', '[^.]*')
        separator = r'\.'
    return re.compile(regex)


def read_rules(text: str) -> list[dict[str, Any]]:
    """Parse the text of a ``--gate`` option into rules.

    Args:
        text: ``PATH=TYPE`` or ``PATH=TYPE(option=value, ...)``; several rules are separated by ``;``. PATH is a
            pattern, see :func:`mmgate.swap_attention`, or several separated by commas. Values are Python literals
            or bare words, which are strings: nothing is evaluated.

    Raises:
        OptionError: The text is no rule; the message has what was read of it, and the form of a rule.
    """
    parts = [part.strip() for part in _split(text, ';')]
    return [_read_rule(part) for part in parts if part] or [_read_rule(text)]


def write_rule(rule: Mapping[str, Any]) -> str:
    """Write a rule as text, which :func:`read_rules` can read again."""
    path = rule['path']
    rule_type = rule['type']
    options = ', '.join(f'{key}={value!r}' for key, value in rule.items() if key not in ('path', 'type'))
    name = getattr(rule_type, '__name__', rule_type)
    return f'{path if isinstance(path, str) else ",".join(path)}={name}{f"({options})" if options else ""}'


@contextmanager
def shown_as_read(rules: Rules) -> Iterator[None]:
    """Add the rules, as they were understood, to the message of a ConfigError from inside the ``with`` block."""
    lines = [f'\n  attention[{number}]: {write_rule(rule)}' for number, rule in enumerate(list_rules(rules))]
    try:
        yield
    except ConfigError as error:
        raise type(error)(f'{error}\nThe rules, as they were read:{"".join(lines)}') from error


def name_of_type(rule: Mapping[str, Any]) -> str:
    """Return the name of a rule's type, without a scope or a module."""
    return getattr(rule['type'], '__name__', str(rule['type'])).rpartition('.')[2]


def as_lines(names: Sequence[str]) -> str:
    """Return names as lines of an error message."""
    return ''.join(f'\n  {name}' for name in names)


def _gate_and_options(rule: Mapping[str, Any], where: str) -> tuple[type[Gate], dict[str, Any]]:
    """Return the class of a rule's gate, and the gate's options, after a check of both."""
    gate = gate_named(rule['type'], where)
    options = {key: value for key, value in rule.items() if key not in ('type', 'path')}
    known = gate_options(gate)
    if issubclass(gate, MapGate):
        refuse_former_options(where, options)
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise OptionError(
            f'{where}: {name_of_type(rule)} has no option {", ".join(unknown)}; it has '
            f'{", ".join(sorted(known)) or "none"} (sizes are those of the module that is gated).'
        )
    missing = [name for name, option in known.items() if option.default is option.empty and name not in options]
    if missing:
        raise OptionError(
            f'{where}: {name_of_type(rule)} cannot be made without {", ".join(missing)}; write it into the rule, as '
            f'in {missing[0]}=...'
        )
    for name, value in options.items():
        taken = str(getattr(known[name].annotation, '__name__', known[name].annotation))
        types = [VALUE_TYPES.get(part.strip().partition('[')[0]) for part in taken.split('|')]
        if None not in types and _type_of(value) not in (*types, None):
            raise OptionError(f'{where}: {name_of_type(rule)} takes {name}: {taken}, got {name}={value!r}.')
    return gate, options


def _type_of(value: object) -> str | None:
    """Return the type of an option's value, one of :data:`VALUE_TYPES`, ``'dict'``, or None for any other object."""
    types: dict[str, Any] = dict(number=(int, float), text=str, tuple=(tuple, list), dict=Mapping)
    return 'None' if value is None else next((name for name, of in types.items() if isinstance(value, of)), None)


def _read_rule(text: str) -> dict[str, Any]:
    path, equals, call = text.partition('=')
    paths = [one.strip() for one in path.split(',')]
    if not equals or not call.strip():
        raise _refusal(text, 'it needs a path and a type, with = between them')
    strange = [one for one in paths if not re.fullmatch(r'[\w.*-]+', one)]
    if strange:
        raise _refusal(text, f'{strange[0]!r} is no path: names of modules, dots and * make one')
    read: dict[str, Any] = dict(path=paths[0] if len(paths) == 1 else paths)
    try:
        node: ast.expr = ast.parse(call.strip(), mode='eval').body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = getattr(error, 'msg', None) or str(error) or 'it is nested too deeply'
        raise _refusal(text, f'what follows the path cannot be read ({reason})', read) from None
    options: list[ast.keyword] = []
    if isinstance(node, ast.Call):
        if node.args:
            said = ast.unparse(node.args[0])
            raise _refusal(text, f'{said} has no name: write every option as option=value', read)
        options = node.keywords
        node = node.func
    read['type'] = ast.unparse(node)
    if not re.fullmatch(r'[\w.]+', read['type']) or isinstance(node, ast.Constant):
        raise _refusal(text, f'{read.pop("type")!r} is no name of a type', read)
    for option in options:
        if option.arg is None or option.arg in ('path', 'type'):
            said = ast.unparse(option.value) if option.arg is None else option.arg
            raise _refusal(text, f'{said} is no option: path and type come first, PATH=TYPE(...)', read)
        if option.arg in read:
            raise _refusal(text, f'{option.arg} is given twice', read)
        read[option.arg] = _literal(text, option.arg, option.value, read)
    return read


def _literal(text: str, name: str, value: ast.expr, read: Mapping[str, Any]) -> Any:
    """Return the value of an option in a rule's text, a Python literal."""
    known = {'true': 'True', 'false': 'False', 'none': 'None', 'null': 'None'}
    # A bare word is the string, as shells take quotes away.
    if isinstance(value, ast.Name) and value.id.lower() not in known:
        return value.id
    try:
        return ast.literal_eval(value)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        said = ast.unparse(value)
    remedy = 'numbers, strings, True, False, None, and tuples, lists and dicts of these are'
    if isinstance(value, ast.Name):
        remedy = f'write {name}={known[said.lower()]}, or {name}={said!r} for the word'
    elif isinstance(value, ast.Call) and getattr(value.func, 'id', '') == 'dict':
        remedy = "write a dict as {'key': value}"
    raise _refusal(text, f'{name}={said} is no literal: {remedy}', read)


def _refusal(text: str, reason: str, read: Mapping[str, Any] | None = None) -> OptionError:
    """Return the exception for a text that is no rule, with an example of one that is."""
    so_far = ', '.join(f'{key} {value!r}' for key, value in (read or {}).items())
    found = f' Read so far: {so_far}.' if so_far else ''
    known = f' {_options_of(read["type"])}' if read and 'type' in read else ''
    return OptionError(f'--gate {text!r}: {reason}.{found}{known} A rule is {FORM}, such as {EXAMPLE!r}.')


def _options_of(name: str) -> str:
    """Return a sentence that lists the options of a type, or an empty text for an unknown type."""
    try:
        names = ', '.join(sorted(gate_options(gate_named(name, ''))))
    except ConfigError:
        return ''
    return f'The options of {name} are {names}.' if names else f'{name} has no options.'


def _split(text: str, separator: str) -> list[str]:
    """Split a text at each separator that lies outside of quotes and brackets."""
    parts = ['']
    quote = ''
    depth = 0
    for character in text:
        if quote:
            quote = '' if character == quote else quote
        elif character in '\'"':
            quote = character
        else:
            depth += (character in OPEN) - (character in CLOSED)
        if character == separator and not quote and depth <= 0:
            parts.append('')
        else:
            parts[-1] += character
    return parts
