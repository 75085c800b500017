"""Models by the names that metafiles give them, ours and the hosts'."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mmengine.fileio import load
from mmengine.infer import BaseInferencer

from .preflight import ConfigError

HOSTS = ('mmdet', 'mmseg')


def package_folder(package: str) -> Path | None:
    """Return the folder of an installed package, without importing it, or None."""
    spec = find_spec(package)
    return Path(spec.origin).parent if spec is not None and spec.origin else None


@cache
def models_of(package: str) -> list[dict[str, Any]]:
    """Return what the metafiles of ``package`` say of its models, empty if it is not installed or ships none.

    Every entry has ``Name``, ``Config`` as an absolute path and ``Weights``, None where none are published.
    """
    folder = package_folder(package)
    if folder is None:
        return []
    # an editable install of a host has its metafiles in the checkout, beside the package
    index = next((root for root in (folder / '.mim', folder.parent) if (root / 'model-index.yml').is_file()), None)
    if index is None:
        return []
    models = []
    for metafile in load(index / 'model-index.yml')['Import']:
        for model in load(index / metafile).get('Models') or []:
            weights = model.get('Weights')
            weights = weights[0] if isinstance(weights, list) else weights
            if 'Config' in model:
                models.append(dict(model, Config=str(index / model['Config']), Weights=weights))
    return models


def find_model(name: str) -> dict[str, Any]:
    """Return the entry of the model called ``name`` (case does not matter), ours before mmdet's before mmseg's.

    Raises:
        ConfigError: No metafile knows the name; the message has the nearest ones.
    """
    known: list[str] = []
    for package in ('mmgate', *HOSTS):
        for model in models_of(package):
            alias = model.get('Alias') or []
            names = [each.lower() for each in (model['Name'], *([alias] if isinstance(alias, str) else alias))]
            if name.lower() in names:
                return model
            known += names
    near = difflib.get_close_matches(name.lower(), known, n=3)
    hint = f' Did you mean {" or ".join(near)}?' if near else ''
    raise ConfigError(f'{name} is neither a config file nor the name of a model in a metafile.{hint}')


def add_to_inferencers() -> None:
    """Let ``DetInferencer(name)`` and ``MMSegInferencer(name)`` find our models among those of their own package.

    mmengine reads the names of a scope from the metafiles of the package of that name, and has no way to add any; a
    scope of our own would not do, because the inferencers build transforms and data sets in it. So what mmengine's
    inferencer reads from mmdet's and mmseg's metafiles goes on with ours. Called once more it does nothing.
    """
    theirs = BaseInferencer._get_models_from_metafile
    if getattr(theirs, 'with_mmgate', False):
        return

    def with_ours(dir: str) -> Iterator[dict[str, Any]]:
        yield from theirs(dir)
        if Path(dir) in _roots():
            yield from models_of('mmgate')

    with_ours.with_mmgate = True  # type: ignore[attr-defined]
    BaseInferencer._get_models_from_metafile = staticmethod(with_ours)


@cache
def _roots() -> set[Path]:
    folders = [folder for folder in map(package_folder, HOSTS) if folder is not None]
    return {root for folder in folders for root in (folder.parent, folder / '.mim')}
