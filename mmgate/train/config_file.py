"""Configs of a command line: read from a file or a package, and changed by ``--cfg-options``.

What the mm tools accept is accepted; a name that looks misspelt is a warning.
"""

from __future__ import annotations

import argparse
import difflib
import inspect
import os.path as osp
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from mmengine.config import Config
from mmengine.runner import Runner

from mmgate._environment import why_not
from mmgate.errors import ConfigError

MMPRETRAIN = 'pip install "mmgate[pretrain]" (beside OpenMMLab\'s own packages: mmpretrain==1.2.0)'
# Alike enough to be a slip of the finger: 'max_epoch' is near 'max_epochs', 'in_channels' not near 'out_channels'.
_ALIKE = 0.8


def load_config(args: argparse.Namespace) -> Config:
    """Read ``args.config``, merge ``args.cfg_options`` and settle the work dir: argument, then config, then file name.

    Raises:
        ConfigError: The file is missing or malformed, or an option cannot be merged into the config.
    """
    cfg = read_config(args.config)
    if args.cfg_options:
        merge_options(cfg, args.cfg_options)
    cfg.launcher = args.launcher
    name = osp.splitext(osp.basename(cfg.filename))[0]
    cfg.work_dir = args.work_dir or cfg.get('work_dir') or osp.join('./work_dirs', name)
    return cfg


def read_config(config: str) -> Config:
    """Return the config of a file or of ``package::path``.

    Raises:
        ConfigError: The file is missing or malformed, or is one of mmpretrain's, which is not here.
    """
    path = config
    if '::' in path:
        from mmengine.config.utils import _get_external_cfg_base_path, _get_package_and_cfg_path
        from mmengine.utils import get_installed_path

        try:
            package, relative = _get_package_and_cfg_path(path)
            path = _get_external_cfg_base_path(get_installed_path(package), relative)
        except (AssertionError, ValueError, FileNotFoundError, ImportError) as error:
            raise ConfigError(f'config {config}: {error}') from error
    if not osp.isfile(path):
        raise ConfigError(f'config {path} does not exist (looked for {osp.abspath(path)}).')
    try:
        cfg = Config.fromfile(path)
    except Exception as error:  # the file is Python, and may raise anything
        problem: str | None = f'cannot be read: {type(error).__name__}: {error}'
        cause: Exception | None = error
    else:
        problem, cause = why_not('mmpretrain') if cfg.get('default_scope') == 'mmpretrain' else None, None
    if problem:
        remedy = f' Type: {MMPRETRAIN}' if 'mmpretrain' in problem else ''
        raise ConfigError(f'config {path}: {problem}.{remedy}') from cause
    return cfg


def mappings(node: Any, where: str = '') -> Iterator[tuple[str, Any]]:
    """Yield every mapping of a config with its path below ``where``, outer ones first."""
    if isinstance(node, Mapping):
        yield where, node
        for key, value in node.items():
            yield from mappings(value, f'{where}.{key}')
    elif isinstance(node, (list, tuple)):
        for number, value in enumerate(node):
            yield from mappings(value, f'{where}.{number}')


def type_name(entry: Mapping[str, Any]) -> str:
    """Return the bare name of what a config entry's ``type`` is: a class, or its name with or without a scope."""
    kind = entry.get('type')
    return getattr(kind, '__name__', str(kind)).rpartition('.')[2]


def merge_options(cfg: Config, options: Mapping[str, Any]) -> None:
    """Merge ``options`` (dotted keys) into ``cfg`` as the mm tools do, and warn of keys that look misspelt.

    A new key is accepted wherever a dict is, because constructors take more than configs spell out. It is warned of
    when a neighbour's name is nearly the same.

    Raises:
        ConfigError: A key goes beyond a list, or below what is neither a dict nor a list.
    """
    for key in options:
        _warn_if_misspelt(cfg, key)
    try:
        cfg.merge_from_dict(dict(options))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f'--cfg-options {" ".join(options)} cannot be merged: {error}') from error


def _warn_if_misspelt(cfg: Config, key: str) -> None:
    node: Any = cfg
    walked: list[str] = []
    for part in key.split('.'):
        if isinstance(node, list) and part.isdigit() and int(part) < len(node):
            node = node[int(part)]
        elif isinstance(node, (Config, Mapping)) and part in node:
            node = node[part]
        else:
            break
        walked.append(part)
    else:
        return
    known = list(map(str, node)) if isinstance(node, (Config, Mapping)) else []
    if not walked:
        known += [*inspect.signature(Runner).parameters, 'tta_pipeline']
    near = [] if part in known else difflib.get_close_matches(part, known, n=1, cutoff=_ALIKE)
    if near:
        meant = '.'.join([*walked, near[0]])
        warnings.warn(f'--cfg-options {key} is new, and is added. Did you mean {meant!r}?', stacklevel=3)
