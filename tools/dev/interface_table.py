"""Write the table of transformers' attention classes, mmgate/hosts/interface_classes.py, from the installed sources.

A class that calls the attention interface is in the table if its forward projects arguments as one of the forms of
mmgate/hosts/interface.py says, and does nothing that a gate would have to know.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import transformers

from mmgate.hosts.interface import DROPOUTS, FORMS, OUTPUTS, PROJECTIONS, WHOLE, hash_of

TABLE = Path(__file__).parents[2] / 'mmgate/hosts/interface_classes.py'
INTERFACE = 'ALL_ATTENTION_FUNCTIONS'
# what a forward may hand to the function beside heads and masks; sliding windows are part of a mask
HANDED = {'attention_mask', 'dropout', 'scaling', 'is_causal', 'output_attentions', 'sliding_window'}
# methods and functions that move numbers and change none
MOVES = {
    *('view', 'reshape', 'transpose', 'permute', 'contiguous', 'flatten', 'unflatten', 'squeeze', 'unsqueeze'),
    *('unbind', 'chunk', 'split', 'tensor_split', 'cat', 'concat', 'stack', 'expand', 'clone', 'to', 'type_as'),
    *('tuple', 'list', 'zip', 'getattr', 'int', 'len', '_shape'),
}
SIZES = {'shape', 'size', 'dim', 'ndim', 'numel', 'device', 'dtype'}
# Classes that the reader takes for one of a form and that are not.
LEFT_OUT = {
    'modeling_kosmos2_5.Kosmos2_5VisionAttention': 'it always calls eager attention, whatever its config says',
    'modeling_florence2.Florence2VisionChannelAttention': 'channels attend, not tokens',
    'modeling_lw_detr.LwDetrAttention': 'it has its adapter, for its groups of queries',
    'modeling_rf_detr.RfDetrAttention': 'the same',
}
# Classes whose form is another than the source shows, and which their own adapter is for.
FORM_OF = {'modeling_sam2.Sam2MultiScaleAttention': 'pooled_self'}

Origin = tuple[str, str]  # what a value comes from: ('projection' | 'child' | 'function' | 'argument' | 'heads', name)


@dataclass
class Reading:
    """Facts that the source of an attention's ``forward`` tells.

    Attributes:
        projections: The children that project query, key and value; one child may project all three.
        output: The child that projects the heads; empty if none does.
        arguments: Those of the forward that query, key and value are projected from.
        changes: Functions and children that change queries or keys between projection and attention.
        others: Functions and children that change what is projected, a value, or what is returned.
        dropout: The attribute that has the rate of dropout, or the module; empty if there is none.
    """

    projections: tuple[str, str, str]
    output: str
    arguments: tuple[frozenset[str], frozenset[str], frozenset[str]]
    changes: frozenset[str] = frozenset()
    others: frozenset[str] = frozenset()
    dropout: str = ''


class UnreadError(ValueError):
    """Error: a ``forward`` does something that no form says; the message is the end of a sentence about the class."""


@dataclass
class Source:
    """The source of a class that calls the attention interface.

    Attributes:
        name: Its module and its name.
        forward: Its forward.
        children: Names that its constructor gives to modules.
        linear: Those of them that are linear layers.
    """

    name: str
    forward: ast.FunctionDef
    children: set[str] = field(default_factory=set)
    linear: set[str] = field(default_factory=set)


def sources(folder: Path) -> Iterator[Source]:
    """Yield each class in the modules of transformers in a folder whose forward calls the attention interface."""
    for path in sorted(folder.glob('models/**/modeling_*.py')):
        classes = {node.name: node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)}
        for name, kind in classes.items():
            forward = _method(kind, 'forward')
            if forward is not None and INTERFACE in _names(forward):
                source = Source(f'{path.stem}.{name}', forward)
                _read_constructors(source, kind, classes)
                yield source


def _method(kind: ast.ClassDef, name: str) -> ast.FunctionDef | None:
    return next((node for node in kind.body if isinstance(node, ast.FunctionDef) and node.name == name), None)


def _read_constructors(source: Source, kind: ast.ClassDef, classes: Mapping[str, ast.ClassDef]) -> None:
    """Find the children that a class and its bases in the same file make."""
    for base in kind.bases:
        if isinstance(base, ast.Name) and base.id in classes:
            _read_constructors(source, classes[base.id], classes)
    constructor = _method(kind, '__init__')
    for node in ast.walk(constructor) if constructor is not None else ():
        if not isinstance(node, ast.Assign):
            continue
        called = [part.func for part in ast.walk(node.value) if isinstance(part, ast.Call)]
        kinds = {ast.unparse(function).rpartition('.')[2] for function in called}
        for target in node.targets:
            if isinstance(target, ast.Attribute) and _is_self(target.value):
                if any(name[:1].isupper() for name in kinds):
                    source.children.add(target.attr)
                if 'Linear' in kinds:
                    source.linear.add(target.attr)


def read(source: Source) -> Reading:
    """Read a forward.

    Raises:
        UnreadError: It does something that no form could say.
    """
    flow = _Flow(source.forward, source.children, source.linear)
    if len(flow.calls) != 1:
        raise UnreadError(f'calls an attention function {len(flow.calls)} times')
    handed, further = flow.calls[0]
    unknown = sorted(further - HANDED)
    if unknown:
        raise UnreadError(f'hands {_listed(unknown)} to its attention function')
    found = []
    for part in ('query', 'key', 'value'):
        projections = sorted(name for where, name in handed[part] if where == 'projection')
        if len(projections) != 1:
            made = f'from {_listed(projections)} together' if projections else 'without a projection'
            raise UnreadError(f'makes its {part} {made}')
        found += projections
    if any(where == 'projection' for where, _ in handed['attention_mask']):
        raise UnreadError('makes a mask from what it projects')
    if len(flow.outputs) > 1:
        raise UnreadError(f'projects its heads by {_listed(sorted(flow.outputs))}')
    changes = {name for part in ('query', 'key') for where, name in handed[part] if where in ('function', 'child')}
    others = {name for where, name in (*flow.returned, *handed['value']) if where in ('function', 'child')}
    others |= {name for made in flow.reads.values() for where, name in made if where in ('function', 'child')}
    query, key, value = found
    return Reading(
        (query, key, value),
        next(iter(flow.outputs), ''),
        tuple(  # type: ignore[arg-type]
            frozenset(name for where, name in flow.reads[projection] if where == 'argument') for projection in found
        ),
        frozenset(changes),
        frozenset(others),
        flow.dropout[0] if flow.dropout else '',
    )


def form_of(source: Source) -> str:
    """Return the name of the form that a class has.

    Raises:
        UnreadError: It has none; the message says why.
    """
    if source.name in LEFT_OUT:
        raise UnreadError(f'is left out: {LEFT_OUT[source.name]}')
    reading = read(source)
    if 'update' in reading.changes:
        raise UnreadError('has a cache')
    if source.name in FORM_OF:
        return FORM_OF[source.name]
    # A norm of the heads of a value is its projection's part; no gate has to know it.
    others = reading.others - {'v_norm'}
    if others:
        raise UnreadError(f'has {_listed(sorted(others))}, which no form has')
    for what, found, names in (
        ('projects', reading.projections, PROJECTIONS),
        ('projects its heads by', reading.output, (*OUTPUTS, '')),
        ('drops by', reading.dropout, (*DROPOUTS, '')),
    ):
        if found not in names:
            raise UnreadError(f'{what} {found}, which no form does')
    whole = WHOLE if reading.changes else ''
    for name, adapter in FORMS.items():
        form = adapter.form
        taken = (
            {form.query, form.query_position},
            {form.key or form.query, form.key_position},
            {form.value or form.key or form.query},
        )
        if form.why_whole_heads == whole and all(
            given - {form.query} == set(names) - {'', form.query} and given
            for given, names in zip(reading.arguments, taken, strict=True)
        ):
            return name
    arguments = '; '.join(', '.join(sorted(names)) for names in reading.arguments)
    raise UnreadError(f'projects {arguments}{", and changes heads" if whole else ""}, which no form does')


class _Flow:
    """Data-flow analysis of a ``forward``: it follows the statements and keeps what each variable's value comes from.

    Attributes:
        calls: Of the attention function: what each of query, key and value comes from, and the names of what else it
            is handed.
        reads: By projection, what its input comes from.
        outputs: The projections that read what the function returns.
        returned: What the output comes from.
        dropout: Path of the attribute that holds the rate of dropout.
    """

    def __init__(self, function: ast.FunctionDef, children: Iterable[str], linear: Iterable[str]) -> None:
        self.children = set(children)
        self.linear = set(linear)
        taken = function.args
        arguments = {one.arg for one in (*taken.posonlyargs, *taken.args, *taken.kwonlyargs)} - {'self'}
        self.interfaces: set[str] = set()
        self.calls: list[tuple[dict[str, frozenset[Origin]], set[str]]] = []
        self.reads: dict[str, set[Origin]] = {}
        self.outputs: set[str] = set()
        self.returned: set[Origin] = set()
        self.dropout: tuple[str, ...] = ()
        self.expressions: dict[str, Any] = {}  # the last that each variable was assigned
        self.known: dict[str, frozenset[Origin]] = {name: frozenset({('argument', name)}) for name in arguments}
        self.run(function.body)

    def run(self, statements: list[Any]) -> None:
        """Follow a list of statements in their order."""
        for statement in statements:
            if isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
                self.assign(statement)
            elif isinstance(statement, (ast.If, ast.For, ast.While, ast.With, ast.Try)):
                self.branch(statement)
            elif isinstance(statement, ast.Return) and statement.value is not None:
                value = statement.value
                self.returned |= self.origins(value.elts[0] if isinstance(value, ast.Tuple) else value)
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
        made: frozenset[Origin] = frozenset().union(*found) if found else frozenset()
        # A factor of projected queries or keys is one that queries of a gate would lack.
        scaled = isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mult, ast.Div))
        return made | {('function', 'a factor')} if scaled and made else made

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
            self.reads.setdefault(name, set()).update(given)
            if any(where == 'heads' for where, _ in given):
                self.outputs.add(name)
            return frozenset({('projection', name)})
        if name in self.children:
            return given | {('child', name)}
        return given if 'head' in name or name in MOVES else given | {('function', name)}

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
    names = set(_names(node))
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


def main() -> None:
    """Write the table, and print the classes that are not in it, each with the reason."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--check', help='another release, a folder with transformers/models: print what differs')
    args = parser.parse_args()
    folder = Path(args.check or Path(transformers.__file__).parent)
    rows = {}
    refused = {}
    for source in sources(folder):
        try:
            rows[source.name] = (form_of(source), hash_of(source.forward))
        except UnreadError as error:
            refused[source.name] = str(error)
    if args.check:
        from mmgate.hosts.interface_classes import CLASSES

        for name in sorted(CLASSES.keys() | rows.keys()):
            if rows.get(name) != CLASSES.get(name):
                print(f'{name}: {rows.get(name, refused.get(name, "is not there"))}, in the table {CLASSES.get(name)}')
        return
    lines = [f'    {name!r}: {row!r},\n' for name, row in sorted(rows.items())]
    text = (
        '"""Attention classes of transformers, each with its form and the hash of its forward.\n\n'
        'tools/dev/interface_table.py writes this file; see :data:`.interface.FORMS` and :func:`.interface.hash_of`.\n'
        f'"""\n\nWRITTEN_WITH = {transformers.__version__!r}  # transformers\n'
        f'CLASSES: dict[str, tuple[str, str]] = {{\n{"".join(lines)}}}\n'
    )
    TABLE.write_text(text)
    for name, reason in refused.items():
        print(f'{re.sub("^modeling_", "", name)} {reason}')
    print(f'{len(rows)} classes are in the table, {len(refused)} are not.')


if __name__ == '__main__':
    main()
