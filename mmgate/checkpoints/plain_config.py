"""Read the text of a config, as checkpoints hold it, without running it.

mmengine executes this text when a run is resumed, and in its inferencers. First it substitutes double braces, for
example by environment variables; it also runs the files that ``_base_`` names, imports the modules of
``custom_imports``, and calls the classes that ``type`` names.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from typing import Any

from mmengine.registry import DATASETS, HOOKS, MODELS, TRANSFORMS

# Packages that a config may import from, beside those that have registries in this process.
SCOPES = {'mmaction', 'mmcls', 'mmcv', 'mmdet', 'mmdet3d', 'mmengine', 'mmgate', 'mmocr', 'mmpose', 'mmpretrain'}
SCOPES |= {'mmrotate', 'mmseg', 'mmtrack', 'mmyolo', 'timm', 'torch', 'torchvision'}
_NAMED = ('type', 'host', '_scope_', 'runner_type', 'constructor', 'grouped')
# Modules of the standard library whose names mmengine uses, too.
_PACKAGES = {'logging'}


def plain_values(text: str) -> dict[str, Any]:
    """Return the values that a config's text assigns; empty for a text that is no Python.

    Raises:
        ValueError: It holds more than values; the message has the line.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return {}
    except (RecursionError, MemoryError) as error:
        raise ValueError('values too deep to read') from error
    values = {}
    for statement in tree.body:
        # Of a = b = 1 there would be two names.
        target = statement.targets[0] if isinstance(statement, ast.Assign) else None
        if not isinstance(target, ast.Name) or len(statement.targets) > 1:  # type: ignore[attr-defined]
            raise ValueError(f'line {statement.lineno}, {ast.unparse(statement)[:40]}')
        try:
            values[target.id] = ast.literal_eval(_Literals().visit(statement.value))  # type: ignore[attr-defined]
        except (ValueError, TypeError, RecursionError, MemoryError) as error:
            raise ValueError(f'line {statement.lineno}, {ast.unparse(statement)[:40]}') from error
    return values


def what_runs(text: str) -> str | None:
    """Return the first part of a config's text that would run code, or None."""
    if '{{' in text:
        return 'a place to be filled in, {{'
    try:
        values = plain_values(text)
    except ValueError as error:
        return str(error)
    if '_base_' in values:
        return f'_base_ = {values["_base_"]!r}'
    given = values.get('custom_imports')
    imports = given.get('imports') if isinstance(given, dict) else None
    for module in [imports] if isinstance(imports, str) else imports or ():
        # A module that is there already, as the running config's are, does not run again.
        if module not in sys.modules and not _is_known(str(module).partition('.')[0]):
            return f'it imports {module}'
    return next((f'{key}={value!r}' for key, value in _named(values) if _calls(value)), None)


class _Literals(ast.NodeTransformer):
    """Rewrite ``dict(a=1)``, the form of dicts in such texts, and infinite numbers as literals."""

    def visit_Call(self, call: ast.Call) -> ast.AST:
        self.generic_visit(call)
        name = call.func.id if isinstance(call.func, ast.Name) else None
        if name == 'float' and len(call.args) == 1 and isinstance(call.args[0], ast.Constant) and not call.keywords:
            return ast.Constant(float(call.args[0].value))  # type: ignore[arg-type]
        # Keys that are no names stand in a dict: dict({'backbone.a': 1}).
        if name != 'dict' or not all(isinstance(given, ast.Dict) for given in call.args):
            return call
        keys: list[Any] = [key for given in call.args for key in given.keys]  # type: ignore[attr-defined]
        values = [value for given in call.args for value in given.values]  # type: ignore[attr-defined]
        # ``**values`` has no name, and is refused as a key.
        keys += [ast.Constant(keyword.arg) if keyword.arg else None for keyword in call.keywords]
        return ast.Dict(keys, values + [keyword.value for keyword in call.keywords])

    def visit_Name(self, name: ast.Name) -> ast.AST:
        return ast.Constant(float(name.id)) if name.id in ('inf', 'nan') else name


def _named(node: object) -> Iterator[tuple[str, str]]:
    """Yield the names of classes in a config, with their keys."""
    if isinstance(node, dict):
        yield from ((key, node[key]) for key in _NAMED if isinstance(node.get(key), str))
        node = tuple(node.values())
    if isinstance(node, (list, tuple, set)):
        for value in node:
            yield from _named(value)


def _calls(name: str) -> bool:
    """Return True if a name might mean something else than a class of torch or an mm package."""
    if '.' not in name:
        return False
    first, *rest = name.split('.')
    if not _is_known(first) or (set(rest) & set(sys.stdlib_module_names)) - _PACKAGES:
        return True
    # A function may do anything, a class of these packages may not.
    return not (rest[-1][:1].isupper() or rest[-1].endswith('collate'))


def _is_known(package: str) -> bool:
    return package in SCOPES or any(package in registry.children for registry in (DATASETS, HOOKS, MODELS, TRANSFORMS))
