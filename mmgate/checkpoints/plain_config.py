"""Whether the text of a config, as it stands in a stranger's checkpoint, holds values and nothing that would run.

mmengine executes such a text when a run is resumed and in its inferencers: after it has put in what stands between
double braces, environment variables among it; it runs the files that ``_base_`` names, and calls what ``type`` names.
"""

from __future__ import annotations

import ast
import sys
from typing import Any

from mmengine.registry import DATASETS, HOOKS, MODELS, TRANSFORMS

CALLS = {'dict', 'float', 'list', 'set', 'tuple'}
# Packages whose classes a config may name with dots, beside those that have registries of their own in this process.
SCOPES = {'mmaction', 'mmcls', 'mmcv', 'mmdet', 'mmdet3d', 'mmengine', 'mmgate', 'mmocr', 'mmpose', 'mmpretrain'}
SCOPES |= {'mmrotate', 'mmseg', 'mmtrack', 'mmyolo', 'timm', 'torch', 'torchvision'}
_NAMED = {'type', 'host', '_scope_', 'runner_type', 'constructor'}
_PACKAGES = {'logging'}  # of mmengine, too


def running_part(text: str) -> str | None:
    """Return what in a config's text would run something, in words; None if it is values alone."""
    if '{{' in text:
        return 'a place to be filled in, {{'
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return None  # nothing that could run
    except (RecursionError, MemoryError):
        return 'values too deep to read'
    for statement in tree.body:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue  # a docstring
        target = statement.targets[0] if isinstance(statement, ast.Assign) and len(statement.targets) == 1 else None
        if not isinstance(statement, ast.Assign) or not isinstance(target, ast.Name):
            return f'line {statement.lineno}, which is no assignment of a value to a name'
        if target.id in CALLS or target.id == '_base_' or target.id.startswith('__'):
            return f'an assignment to {target.id}'
        found = _beside_values(statement.value)
        if found:
            return found
    return None


def _beside_values(value: ast.expr) -> str | None:
    stack: list[Any] = [value]
    while stack:
        node = stack.pop()
        named: list[tuple[Any, ast.expr]] = []
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CALLS:
            unseen = node.func.id == 'dict' and not all(isinstance(given, ast.Dict) for given in node.args)
            if unseen or any(keyword.arg is None for keyword in node.keywords):
                return f'line {node.lineno}, a dict whose keys do not stand there'
            named = [(keyword.arg, keyword.value) for keyword in node.keywords]
            stack += node.args
        elif isinstance(node, ast.Dict):
            if any(isinstance(key, ast.Name) for key in node.keys):
                return f'line {node.lineno}, a dict whose keys do not stand there'
            keys = [key.value if isinstance(key, ast.Constant) else None for key in node.keys]
            named = list(zip(keys, node.values, strict=True))
            stack += [key for key in node.keys if key is not None]
        elif isinstance(node, (ast.List, ast.Tuple, ast.Set)):
            stack += node.elts
        elif isinstance(node, ast.Name) and not node.id.startswith('__'):
            continue  # a value from above
        elif isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.Constant):
            continue  # a sign
        elif not isinstance(node, ast.Constant):
            return f'line {node.lineno}, {ast.unparse(node)[:40]}, which is no value'
        for name, item in named:
            if name in _NAMED and _calls_anything(item):
                return f'{name}={ast.unparse(item)}'
            stack.append(item)
    return None


def _calls_anything(value: ast.expr) -> bool:
    """Return whether a component's name has dots and is no class of a package with registries, or of torch."""
    if isinstance(value, ast.Name):
        return True  # a name from above
    if not isinstance(value, ast.Constant) or not isinstance(value.value, str) or '.' not in value.value:
        return False
    first, *rest = value.value.split('.')
    scopes = SCOPES.union(*(registry.children for registry in (DATASETS, HOOKS, MODELS, TRANSFORMS)))
    if first not in scopes or (set(rest) & set(sys.stdlib_module_names)) - _PACKAGES:
        return True
    return not (rest[-1][:1].isupper() or rest[-1].endswith('collate'))  # functions may do anything
