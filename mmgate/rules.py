"""Read and write rules as text, ``PATH=TYPE(option=value, ...)``, as the option ``--gate`` takes them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from mmgate.errors import ConfigError, OptionError
from mmgate.hosts.table import options_of
from mmgate.swap import Rules, check_options, parse_rules, type_named

FORM = 'PATH=TYPE(option=value, ...)'
EXAMPLE = "encoder.layers.*.self_attn=PLuGMultiheadAttention(gml='sum')"
OPEN = '([{'
CLOSED = ')]}'


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


def check_rules(rules: Sequence[Mapping[str, Any]]) -> None:
    """Raise an error, before a model is built, for rules with an unknown type or an unknown option.

    Raises:
        ConfigError: A rule is wrong; the message has the rule and the types or options that there are.
    """
    for rule in rules:
        where = f'--gate {write_rule(rule)}'
        rule_type = type_named(rule['type'], where)
        check_options(rule_type, {key: value for key, value in rule.items() if key not in ('path', 'type')}, where)


@contextmanager
def shown_as_read(rules: Rules) -> Iterator[None]:
    """Add the rules, as they were understood, to the message of a ConfigError from inside the ``with`` block."""
    listed = [f'\n  attention[{number}]: {write_rule(rule)}' for number, rule in enumerate(parse_rules(rules))]
    try:
        yield
    except ConfigError as error:
        raise type(error)(f'{error}\nThe rules, as they were read:{"".join(listed)}') from error


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
        names = ', '.join(sorted(options_of(type_named(name, ''))))
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
