"""Recognise attention classes of transformers by the source code of their ``forward``, without a list of names.

Such a class projects queries, keys and values, hands them to a function that ``ALL_ATTENTION_FUNCTIONS`` names, and
projects the heads that it gets back. :func:`read_forward` finds in the source which children project, and what else a
forward does with the heads. Anything that it does not know is a reason to refuse the class, and the reason is what was
found.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from torch import nn

from mmgate.errors import ConfigError
from mmgate.gates.base.gating import CHILD, host_class

INTERFACE = 'ALL_ATTENTION_FUNCTIONS'
# what a forward may hand to the function beside heads and masks; sliding windows are part of a mask
HANDED = {'attention_mask', 'dropout', 'scaling', 'is_causal', 'output_attentions', 'sliding_window'}
# methods and functions that move numbers and change none
MOVES = {
    *('view', 'reshape', 'transpose', 'permute', 'contiguous', 'flatten', 'unflatten', 'squeeze', 'unsqueeze'),
    *('unbind', 'chunk', 'split', 'tensor_split', 'cat', 'concat', 'stack', 'expand', 'clone', 'to', 'type_as'),
    *('tuple', 'list', 'zip', 'getattr', 'int', 'len'),
}
SIZES = {'shape', 'size', 'dim', 'ndim', 'numel', 'device', 'dtype'}

Origin = tuple[str, str]  # what a value comes from: ('projection' | 'child' | 'function' | 'argument' | 'heads', name)


@dataclass
class Reading:
    """Facts that the source of an attention's ``forward`` tells, such as which child projects queries.

    Attributes:
        query: The child that projects queries.
        key: The child that projects keys.
        value: The child that projects values; one child may project all three.
        output: The child that projects the heads.
        changes: Functions that change queries or keys between their projection and the attention.
        arguments: Those of the forward that each projection reads, by its name.
        required: The arguments that a forward has to be given.
        dropout: The expression that names the rate of dropout, as a path of attributes; empty if there is none.
    """

    query: str
    key: str
    value: str
    output: str
    changes: tuple[str, ...] = ()
    arguments: dict[str, frozenset[str]] = field(default_factory=dict)
    required: tuple[str, ...] = ()
    dropout: tuple[str, ...] = ()

    @property
    def projections(self) -> tuple[str, str, str]:
        """The names of the children that project query, key and value."""
        return self.query, self.key, self.value


def goes_through_interface(kind: type[nn.Module]) -> bool:
    """Return True if an attention class calls ALL_ATTENTION_FUNCTIONS, the attention interface of transformers."""
    known: Any = kind
    return _names_functions(known)


@cache
def _names_functions(kind: Any) -> bool:
    forward = getattr(kind, 'forward', None)  # a scripted module's class has none
    code = None if forward is None else getattr(inspect.unwrap(forward), '__code__', None)
    return code is not None and INTERFACE in code.co_names


def read_forward(host: nn.Module) -> Reading:
    """Read the source of an attention's ``forward``, and return which child projects queries, keys, values and output.

    Args:
        host: The attention, gated or not.

    Raises:
        ConfigError: It does something else than this module's first lines say.
    """
    children = {name for name, _ in host.named_children()} - {CHILD}
    linear = {name for name in children if hasattr(getattr(host, name), 'in_features')}
    known: Any = host_class(host)
    try:
        return _read(known, frozenset(children), frozenset(linear))
    except _UnreadError as error:
        raise ConfigError(f'A {known.__name__} {error}.') from error


class _UnreadError(ValueError):
    """Error: a ``forward`` does something unknown; the message is the end of a sentence about the class."""


@cache
def _read(kind: Any, children: frozenset[str], linear: frozenset[str]) -> Reading:
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(kind.forward)))
    except OSError as error:
        raise _UnreadError('has no source to read') from error
    function: Any = ast.parse(source).body[0]
    flow = _Flow(function, children, linear)
    if len(flow.calls) != 1:
        raise _UnreadError(f'calls an attention function {len(flow.calls)} times')
    handed, further = flow.calls[0]
    unknown = sorted(further - HANDED)
    if unknown:
        raise _UnreadError(f'hands {_listed(unknown)} to its attention function')
    found = []
    for part in ('query', 'key', 'value'):
        projections = sorted(name for where, name in handed[part] if where == 'projection')
        if len(projections) != 1:
            made = f'from {_listed(projections)} together' if projections else 'without a projection'
            raise _UnreadError(f'makes its {part} {made}')
        found += projections
    if len(set(found)) == 2:
        raise _UnreadError(f'projects query, key and value by {_listed(found)}')
    if len(flow.outputs) != 1:
        raise _UnreadError(
            f'projects its heads by {_listed(sorted(flow.outputs))}' if flow.outputs else 'does not project its heads'
        )
    changed = {name for part in ('query', 'key') for where, name in handed[part] if where == 'function'}
    arguments = function.args
    defaults = len(arguments.defaults)
    positional = [one.arg for one in (*arguments.posonlyargs, *arguments.args)][1:]
    required = positional[: len(positional) - defaults] if defaults else positional
    required += [
        one.arg for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if default is None
    ]
    query, key, value = found
    return Reading(
        query,
        key,
        value,
        output=next(iter(flow.outputs)),
        changes=tuple(sorted(changed)),
        arguments={name: frozenset(reads) for name, reads in flow.reads.items()},
        required=tuple(required),
        dropout=flow.dropout,
    )


class _Flow:
    """Data-flow analysis of a ``forward``: it follows the statements and keeps what each variable's value comes from.

    Attributes:
        calls: Of the attention function: what each of query, key and value comes from, and the names of what else it
            is handed.
        reads: The forward's arguments that each projection reads.
        outputs: The projections that read what the function returns.
        dropout: Path of the attribute that holds the rate of dropout.
    """

    def __init__(self, function: Any, children: Iterable[str], linear: Iterable[str]) -> None:
        self.children = set(children)
        self.linear = set(linear)
        taken = function.args
        self.arguments = {one.arg for one in (*taken.posonlyargs, *taken.args, *taken.kwonlyargs)} - {'self'}
        self.interfaces: set[str] = set()
        self.calls: list[tuple[dict[str, frozenset[Origin]], set[str]]] = []
        self.reads: dict[str, set[str]] = {}
        self.outputs: set[str] = set()
        self.dropout: tuple[str, ...] = ()
        self.expressions: dict[str, Any] = {}  # the last that each variable was assigned
        self.known: dict[str, frozenset[Origin]] = {name: frozenset({('argument', name)}) for name in self.arguments}
        self.run(function.body)

    def run(self, statements: list[Any]) -> None:
        """Follow a list of statements in their order."""
        for statement in statements:
            if isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
                self.assign(statement)
            elif isinstance(statement, (ast.If, ast.For, ast.While, ast.With, ast.Try)):
                self.branch(statement)
            else:
                for value in ast.iter_child_nodes(statement):
                    self.origins(value)

    def branch(self, statement: Any) -> None:
        """Follow both branches of an ``if`` or a loop, and keep the origins that either gives to a variable."""
        for name in ('test', 'iter'):
            if hasattr(statement, name):
                self.origins(getattr(statement, name))
        before = dict(self.known)
        after: list[dict[str, frozenset[Origin]]] = []
        for body in (statement.body, getattr(statement, 'orelse', [])):
            self.known = dict(before)
            self.run(body)
            after.append(self.known)
        names = {name for known in after for name in known}
        self.known = {name: frozenset().union(*(known.get(name, frozenset()) for known in after)) for name in names}

    def assign(self, statement: Any) -> None:
        """Follow an assignment: keep what the variables on its left side come from."""
        if statement.value is None:
            return
        targets: list[Any] = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        if _names_interface(statement.value):
            self.interfaces |= {name for target in targets for name in _names(target)}
            return
        source: Any = statement.value
        made = self.origins(source)
        for target in targets:
            if isinstance(target, ast.Name):
                self.expressions[target.id] = source
            several = isinstance(target, ast.Tuple)
            if several and isinstance(source, ast.Call):
                self.keep_each(target, source, made)
            elif several and isinstance(source, ast.Tuple):
                for inner, value in zip(target.elts, source.elts, strict=False):
                    self.keep(inner, self.origins(value))
            else:
                self.keep(target, made, adds=isinstance(statement, ast.AugAssign))

    def keep_each(self, target: Any, call: ast.Call, made: frozenset[Origin]) -> None:
        """Keep the origins of a call's several results; one that is named like an argument comes from that alone."""
        given = {part.id for part in call.args if isinstance(part, ast.Name)}
        before = dict(self.known)
        others = frozenset(one for one in made if one[0] not in ('projection', 'argument'))
        for inner in target.elts:
            same = isinstance(inner, ast.Name) and inner.id in given
            self.keep(inner, before.get(inner.id, frozenset()) | others if same else made)

    def keep(self, target: Any, made: frozenset[Origin], adds: bool = False) -> None:
        """Keep these origins for every variable name in an assignment's target."""
        for name in _names(target):
            self.known[name] = (self.known.get(name, frozenset()) if adds else frozenset()) | made

    def origins(self, node: Any) -> frozenset[Origin]:
        """Return what the value of an expression comes from: projections, children, functions or arguments."""
        if isinstance(node, ast.Name):
            return self.known.get(node.id, frozenset())
        if isinstance(node, ast.Attribute):
            return frozenset() if node.attr in SIZES else self.origins(node.value)
        if isinstance(node, (ast.GeneratorExp, ast.ListComp)):
            for part in node.generators:
                self.keep(part.target, self.origins(part.iter))
            return self.origins(node.elt)
        if isinstance(node, ast.Call):
            return self.called(node)
        found = [self.origins(child) for child in ast.iter_child_nodes(node)]
        return frozenset().union(*found) if found else frozenset()

    def called(self, node: ast.Call) -> frozenset[Origin]:
        """Return what the result of a function call comes from."""
        function = node.func
        if isinstance(function, ast.Name) and function.id in self.interfaces:
            self.attend(node)
            return frozenset({('heads', '')})
        values = [*node.args, *(keyword.value for keyword in node.keywords)]
        given: frozenset[Origin] = frozenset().union(*(self.origins(value) for value in values))
        if isinstance(function, ast.Name):
            return given if function.id in MOVES else given | {('function', function.id)}
        if not isinstance(function, ast.Attribute):
            return given
        name = function.attr
        if _is_self(function.value):
            return self.child(name, given)
        if name in SIZES:
            return frozenset()
        given = given | self.origins(function.value)
        return given if name in MOVES else given | {('function', name)}

    def child(self, name: str, given: frozenset[Origin]) -> frozenset[Origin]:
        """Return the origins of the value that a call of a child, or of a method of the module, returns."""
        if name in self.linear:
            self.reads.setdefault(name, set()).update(one for where, one in given if where == 'argument')
            if any(where == 'heads' for where, _ in given):
                self.outputs.add(name)
            return frozenset({('projection', name)})
        if name in self.children:
            return given | {('child', name)}
        return given if 'head' in name else given | {('function', name)}

    def attend(self, node: ast.Call) -> None:
        """Keep what the arguments of the call of the attention function come from."""
        names = ('module', 'query', 'key', 'value', 'attention_mask')
        handed = {name: self.origins(value) for name, value in zip(names, node.args, strict=False)}
        further = set()
        for keyword in node.keywords:
            if keyword.arg is None:
                continue
            if keyword.arg in names:
                handed[keyword.arg] = self.origins(keyword.value)
            else:
                further.add(keyword.arg)
            if keyword.arg == 'dropout':
                rate = keyword.value
                rate = self.expressions.get(rate.id, rate) if isinstance(rate, ast.Name) else rate
                self.dropout = _path_of_self(rate)
        self.calls.append(({part: handed.get(part, frozenset()) for part in names}, further))


def _names_interface(node: Any) -> bool:
    """Return True if an expression looks up an attention function of transformers, or is the fallback for one."""
    names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    return INTERFACE in names or names == {'eager_attention_forward'}


def _names(target: Any) -> list[str]:
    return [part.id for part in ast.walk(target) if isinstance(part, ast.Name)]


def _is_self(node: Any) -> bool:
    return isinstance(node, ast.Name) and node.id == 'self'


def _path_of_self(node: Any) -> tuple[str, ...]:
    """Return the longest attribute path of ``self`` in an expression, such as ``dropout.p``, without ``training``."""
    found: list[tuple[str, ...]] = []
    for part in ast.walk(node):
        path: list[str] = []
        inner = part
        while isinstance(inner, ast.Attribute):
            path.insert(0, inner.attr)
            inner = inner.value
        if _is_self(inner) and path and path != ['training']:
            found.append(tuple(path))
    return max(found, key=len, default=())


def _listed(names: Iterable[str]) -> str:
    return ' and '.join(names)
