"""Check that the text of a config, as checkpoints hold it, has plain values only and runs no code.

mmengine executes this text when a run is resumed, and in its inferencers. First it substitutes double braces, for
example by environment variables; it also runs the files that ``_base_`` names, and calls the classes that ``type``
names.
"""

from __future__ import annotations

import ast
import sys
from typing import Any

from mmengine.registry import DATASETS, HOOKS, MODELS, TRANSFORMS

CALLS = {'dict', 'float', 'list', 'set', 'tuple'}
# Packages whose classes a config may name with dots, beside those that have registries in this process.
SCOPES = {'mmaction', 'mmcls', 'mmcv', 'mmdet', 'mmdet3d', 'mmengine', 'mmgate', 'mmocr', 'mmpose', 'mmpretrain'}
SCOPES |= {'mmrotate', 'mmseg', 'mmtrack', 'mmyolo', 'timm', 'torch', 'torchvision'}
_NAMED = {'type', 'host', '_scope_', 'runner_type', 'constructor'}
# Modules of the standard library whose names mmengine uses, too.
_PACKAGES = {'logging'}
_PLAIN = (
    *(ast.Module, ast.Assign, ast.Expr, ast.Constant, ast.List, ast.Set, ast.Tuple),
    *(ast.UnaryOp, ast.unaryop, ast.expr_context),
)


def running_part(text: str) -> str | None:
    """Return the first part of a config's text that would run code, with its line number, or None."""
    if '{{' in text:
        return 'a place to be filled in, {{'
    try:
        tree = ast.parse(text)
    # A text that is no Python cannot run.
    except (SyntaxError, ValueError):
        return None
    except (RecursionError, MemoryError):
        return 'values too deep to read'
    for node in ast.walk(tree):
        if not _is_value(node):
            running: Any = node
            return f'line {running.lineno}, {ast.unparse(running)[:40]}'
    return None


def _is_value(node: ast.AST) -> bool:
    """Return True if a node of a config's syntax tree runs no code by itself; its children are checked separately."""
    if isinstance(node, ast.Name):
        bound_anew = isinstance(node.ctx, ast.Store) and node.id in {*CALLS, '_base_'}
        return not bound_anew and not node.id.startswith('__')
    if isinstance(node, ast.Call):
        called = node.func.id if isinstance(node.func, ast.Name) else None
        keys_stand_there = called != 'dict' or all(isinstance(given, ast.Dict) for given in node.args)
        return called in CALLS and keys_stand_there
    if isinstance(node, ast.keyword):
        return node.arg is not None and not (node.arg in _NAMED and _calls(node.value))
    if isinstance(node, ast.Dict):
        return not any(
            key is None or isinstance(key, ast.Name) or (getattr(key, 'value', None) in _NAMED and _calls(value))
            for key, value in zip(node.keys, node.values, strict=True)
        )
    return isinstance(node, _PLAIN)


def _calls(value: ast.expr) -> bool:
    """Return True if the value of a ``type`` key might name something else than a class of torch or an mm package."""
    # A name may be set anywhere in the text.
    if isinstance(value, ast.Name):
        return True
    if not isinstance(value, ast.Constant) or not isinstance(value.value, str) or '.' not in value.value:
        return False
    first, *rest = value.value.split('.')
    scopes = SCOPES.union(*(registry.children for registry in (DATASETS, HOOKS, MODELS, TRANSFORMS)))
    if first not in scopes or (set(rest) & set(sys.stdlib_module_names)) - _PACKAGES:
        return True
    # A function may do anything, a class of these packages may not.
    return not (rest[-1][:1].isupper() or rest[-1].endswith('collate'))
