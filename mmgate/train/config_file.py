"""Configs: read from a file or a package, changed by a command line's options, walked through."""

from __future__ import annotations

import argparse
import os.path as osp
from collections.abc import Iterator, Mapping
from typing import Any

from mmengine.config import Config

from mmgate._environment import why_not
from mmgate.errors import ConfigError

from .options import merge_options

EXTRAS = {'mmpretrain': 'pip install "mmgate[pretrain]" (beside OpenMMLab\'s own packages: mmpretrain==1.2.0)'}


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
        ConfigError: The file is missing or malformed, or is of an optional package that is not here.
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
        raise ConfigError(f'config {path} cannot be read: {type(error).__name__}: {error}{_remedy(error)}') from error
    scope = cfg.get('default_scope')
    problem = why_not(scope) if scope in EXTRAS else None
    if problem:
        raise ConfigError(f'config {path} is one of {scope}, and {problem}.{_remedy(scope)}')
    return cfg


def _remedy(text: object) -> str:
    """Return what to type for the packages that a text names, if anything."""
    return ''.join(f' Type: {line}' for package, line in EXTRAS.items() if package in str(text))


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
