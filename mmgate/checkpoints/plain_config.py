"""Whether the text of a config, as it stands in a stranger's checkpoint, holds values and nothing that would run.

mmengine executes such a text when a run is resumed and in its inferencers: after it has put in what stands between
double braces, environment variables among it; it runs the files that ``_base_`` names, and calls what ``type`` names.
"""

from __future__ import annotations

import ast
import sys

from mmengine.registry import DATASETS, HOOKS, MODELS, TRANSFORMS

CALLS = {'dict', 'float', 'list', 'set', 'tuple'}
# Packages whose classes a config may name with dots, beside those that have registries of their own in this process.
SCOPES = {'mmaction', 'mmcls', 'mmcv', 'mmdet', 'mmdet3d', 'mmengine', 'mmgate', 'mmocr', 'mmpose', 'mmpretrain'}
SCOPES |= {'mmrotate', 'mmseg', 'mmtrack', 'mmyolo', 'timm', 'torch', 'torchvision'}
_NAMED = {'type', 'host', '_scope_', 'runner_type', 'constructor'}
_PACKAGES = {'logging'}  # of mmengine, too
_PLAIN = (
    *(ast.Module, ast.Assign, ast.Expr, ast.Constant, ast.Dict, ast.List, ast.Set, ast.Tuple),
    *(ast.UnaryOp, ast.unaryop, ast.expr_context, ast.keyword),
)


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
    return next((found for found in map(_running, ast.walk(tree)) if found), None)


def _running(node: ast.AST) -> str | None:
    """Return what is wrong with a node itself, whatever lies in it."""
    named: list[tuple[object, ast.expr]] = []
    if isinstance(node, ast.Name):
        assigned = isinstance(node.ctx, ast.Store) and (node.id in CALLS or node.id == '_base_')
        return f'line {node.lineno}, {node.id}' if assigned or node.id.startswith('__') else None
    if isinstance(node, ast.Call):
        if not isinstance(node.func, ast.Name) or node.func.id not in CALLS:
            return f'line {node.lineno}, {ast.unparse(node)[:40]}, which is no value'
        if node.func.id == 'dict' and not all(isinstance(given, ast.Dict) for given in node.args):
            return f'line {node.lineno}, a dict whose keys do not stand there'
        named = [(keyword.arg, keyword.value) for keyword in node.keywords]
    elif isinstance(node, ast.Dict):
        named = [(getattr(key, 'value', None), value) for key, value in zip(node.keys, node.values, strict=True)]
        if any(isinstance(key, ast.Name) or key is None for key in node.keys):
            return f'line {node.lineno}, a dict whose keys do not stand there'
    elif isinstance(node, ast.keyword) and node.arg is None:
        return f'line {node.lineno}, a dict whose keys do not stand there'
    elif isinstance(node, ast.stmt) and not isinstance(node, _PLAIN):
        return f'line {node.lineno}, which is no assignment of a value to a name'
    elif not isinstance(node, _PLAIN):
        return f'line {getattr(node, "lineno", 0)}, {ast.unparse(node)[:40]}, which is no value'
    return next((f'{name}={ast.unparse(value)}' for name, value in named if name in _NAMED and _calls(value)), None)


def _calls(value: ast.expr) -> bool:
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
