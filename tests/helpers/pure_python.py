"""A config as mmengine's pure Python style has it: imported classes for names, and no ``default_scope``."""

from __future__ import annotations

import re
from pathlib import Path

from mmengine import registry
from mmengine.config import Config

from mmgate.mm.config_file import mappings

KEYS = ('type', 'host')


def write_in_pure_python(cfg: Config, path: Path) -> str:
    """Write a config whose ``type`` and ``host`` are classes into a file, and return the file's path as text."""
    cfg = Config(cfg.to_dict())
    scope = cfg.default_scope
    cfg.default_scope = None
    imports = []
    for _, entry in mappings(cfg._cfg_dict):
        for key in KEYS:
            kind = _class_of(entry.get(key), scope)
            if kind is not None:
                imports.append(f'from {kind.__module__} import {kind.__name__} as {_name(kind)}')
                entry[key] = f'<{_name(kind)}>'
    text = re.sub(r"'<(\w+)>'", r'\1', cfg.pretty_text)
    path.write_text('\n'.join([*dict.fromkeys(imports), text]))
    return str(path)


def _class_of(name: object, scope: str) -> type | None:
    if not isinstance(name, str):
        return None
    registries = (one for one in vars(registry).values() if isinstance(one, registry.Registry))
    for one in registries:
        with one.switch_scope_and_registry(scope) as found:
            kind = found.get(name)
        if kind is not None:
            return kind
    return None


def _name(kind: type) -> str:
    return f'{kind.__module__}.{kind.__name__}'.replace('.', '_')
